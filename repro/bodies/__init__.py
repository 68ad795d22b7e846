"""One stand-alone program a fault; each needs torch and nothing else, and says `fault shown` (1) or `not shown` (0)."""
