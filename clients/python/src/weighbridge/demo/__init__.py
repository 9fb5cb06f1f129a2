"""`weighbridge demo`: the whole way of one model through the suite, checked as it goes."""
