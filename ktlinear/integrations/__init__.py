"""ktlinear inside other libraries. Each module imports its library, and is imported only where it is wanted."""
