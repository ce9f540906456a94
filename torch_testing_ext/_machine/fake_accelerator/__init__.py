"""The fake accelerator: a device type of torch's for a machine that has none, built of C++ once for each torch.

`starting` gives it to the processes of a run, `building` makes the library, `registering` gives it to torch in one
process, and `device_module` is `torch.fakeacc`. Only the options and the package itself import `starting`.
"""
