"""`dflash doctor`: what is looked at before a training, one file a group of checks, all of them in `groups.GROUPS`."""
