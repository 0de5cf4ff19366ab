"""Earlier behaviour of libraries, put in place while a step is traced.

In: a trial with `versions`. Out: replacements, an entry of harness/spec/version_differences.py for each.
It must not be entered where a trial is measured.
"""
