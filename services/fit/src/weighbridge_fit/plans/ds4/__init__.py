"""ds4 (DwarfStar): DeepSeek-class chat models, resident or with experts streamed from disk."""
