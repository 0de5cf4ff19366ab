"""Files read and written with care: bounded reads, whole writes, safe names, secrets masked.

In: paths and text that may come from anybody. Out: checked content, or an error that says what is wrong.
It must not know what the content means.
"""
