// CPU tensors that share the memory of the device's tensors during an operation or a collective.
//
// Nothing is copied, so that views, out= and in-place operations hold without a list of operations.

#pragma once
#include "device.h"

namespace {
constexpr auto kNoLayout = "a fake accelerator has no tensors of layout ";

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

Tensor tensor_of(Storage storage, c10::DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  return made;
}

// The CPU tensors that stand for the device's tensors during one call.
class OnHost {
 public:
  explicit OnHost(bool takes_others = true) : takes_others_(takes_others) {}
  std::vector<std::pair<Tensor, Tensor>> tensors;

  template <std::integral T> T operator()(T number) { return number; }
  template <class T> std::vector<T> operator()(const std::vector<T>& list) { return c10::fmap(list, std::ref(*this)); }
  Tensor operator()(const Tensor& tensor) {
    if (tensor.defined() && !is_ours(tensor)) {
      TORCH_CHECK(takes_others_, "No backend type associated with device type ", tensor.device().type(),
          ": fakeccl takes tensors of fake accelerators only");
    }
    if (!is_ours(tensor)) return tensor;
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, kNoLayout, tensor.layout());
    for (auto& [device, host] : tensors) if (device.is_same(tensor)) return host;
    tensors.emplace_back(tensor, tensor_of((*this)(tensor.storage()), c10::DispatchKey::CPU, tensor));
    return tensors.back().second;
  }
  Storage operator()(const Storage& storage) {
    for (auto& [device, host] : storages_) if (device.is_alias_of(storage)) return host;
    DataPtr data(on_host(storage.data()), new Storage(storage), &release, c10::kCPU);
    Storage made({}, storage.nbytes(), std::move(data), cpu_allocator(), true);
    return storages_.emplace_back(storage, made).second;
  }
  // The device's tensor for a result of the call: an argument, a view of one, or a new tensor.
  Tensor back(const Tensor& result, DeviceIndex device_index) {
    if (!result.defined() || !result.is_cpu()) return result;
    for (auto& [device, host] : tensors) if (host.is_same(result)) return device;
    TORCH_CHECK_NOT_IMPLEMENTED(result.layout() == at::kStrided, kNoLayout, result.layout());
    return tensor_of(on_device(result.storage(), device_index), c10::DispatchKey::PrivateUse1, result);
  }
  // Does to the device's tensors what the call has done to the shape or the storage of the host's.
  void settle() {
    for (auto& [device, host] : storages_)
      if (on_host(device.data()) != host.data() || device.nbytes() != host.nbytes()) memory.replace(device, host);
    for (auto& [device, host] : tensors) {
      const auto storage = on_device(host.storage(), device.device().index());
      auto* impl = device.unsafeGetTensorImpl();
      if (!device.storage().is_alias_of(storage)) impl->set_storage_keep_dtype(storage);
      const bool is_same = device.sizes() == host.sizes() && device.strides() == host.strides() &&
          device.storage_offset() == host.storage_offset();
      if (!is_same) impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

 private:
  static void release(void* storage) { delete static_cast<Storage*>(storage); }
  Storage on_device(const Storage& of, DeviceIndex device_index) {
    for (auto& [device, host] : storages_) if (host.is_alias_of(of)) return device;
    Storage made({}, of.nbytes(), memory.adopt(of, device_index), &memory, true);
    streams.write(Streams::current_on(device_index), of.data());
    return storages_.emplace_back(made, of).first;
  }
  const bool takes_others_;
  std::vector<std::pair<Storage, Storage>> storages_;
};

// What a stream reads: all bits are set (NaN, or -1) in memory that another stream writes, for which it has not waited.
Tensor read(const Tensor& device, const Tensor& host, StreamKey stream, const std::string& name) {
  if (!is_ours(device) || !streams.is_unfinished(stream, on_host(device.storage().data()))) return host;
  TORCH_WARN("fake accelerator: ", name, " on stream ", stream.second, " reads a tensor that another stream writes, "
      "and has not waited for that stream. With late streams, it reads wrong numbers");
  auto unfinished = host.clone();
  std::memset(unfinished.mutable_data_ptr(), 0xFF, unfinished.nbytes());
  return unfinished;
}

void write(const Tensor& device, StreamKey stream) {
  if (is_ours(device)) streams.write(stream, on_host(device.storage().data()));
}
}  // namespace
