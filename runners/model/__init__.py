"""Model, optimizer and data of a trial.

In: a Trial and a device. Out: a module, an optimizer, batches.
The room must not know the loop; what a technique changes is in runners/techniques.
"""
