"""The ds4 engine (DwarfStar): very large chat models, planned and supervised by us, computed by its own server."""
