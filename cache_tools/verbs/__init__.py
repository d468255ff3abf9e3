"""The verbs of `muse-cache`, one file each; `cache_tools.cli` says what each is for."""
