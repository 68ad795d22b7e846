"""`dflash report`: runs as one self-contained page."""
