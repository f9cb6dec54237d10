"""One model and one batch through a layout and through one process: are the numbers the same?"""
