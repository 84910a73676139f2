"""The programs, by what users do."""
