"""What earlier versions of libraries did otherwise, put in place while a step is traced.

In: a trial with `versions`. Out: replacements, an entry of harness/spec/version_differences.py for each.
It must not be entered where a trial is measured.
"""
