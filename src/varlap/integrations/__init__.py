"""varlap inside other libraries. Each module here needs an extra of its own and is imported by its name."""
