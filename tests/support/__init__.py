"""Shared by tests: a kernel that compiles in milliseconds, and child processes."""
