"""Files to plain text with sections and pages, in a child process. Imports neither torch nor faiss."""
