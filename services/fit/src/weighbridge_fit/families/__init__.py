"""Engine families: what each can price, how it is asked, and how its plan travels."""
