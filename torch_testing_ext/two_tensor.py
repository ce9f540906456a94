"""A tensor subclass that holds two tensors, under the names of torch.testing._internal.two_tensor."""

from torch_testing_ext._testing.helpers.two_tensors import TwoTensor as TwoTensor, TwoTensorMode as TwoTensorMode
