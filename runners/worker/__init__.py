"""The child process, from a spec over forked ranks to a result, and servers that answer many questions in one process.

In: a folder with a spec. Out: a result file in it.
It must not outlive its parent.
"""
