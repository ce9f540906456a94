// Operations of the fake accelerator: those of the CPU, on tensors that share the memory of the device's tensors.

#pragma once
#include "driver.h"
#include "host_view.h"
#include <ATen/OpMathType.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace {
using torch::jit::Stack;

// Runs an operation on the host. CPU tensors beside those of the device are the error that they are on CUDA.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), stack_(stack) {}
  void run() {
    TORCH_CHECK_NOT_IMPLEMENTED(op_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), name(),
        " is not there for fake accelerators: it is not there for the CPU, which computes for them");
    auto* value = &*(stack_->end() - static_cast<int64_t>(op_.schema().arguments().size()));
    for (const auto& argument : op_.schema().arguments()) find_device(argument, *value++);
    TORCH_CHECK(!device_ || !other_, "Expected all tensors to be on the same device, but got ", other_name_, " is on ",
        *other_, ", different from other tensors on ", *device_, " (when checking argument in method ", name(), ")");
    stream_ = Streams::current_on(checked(device_ ? device_->index() : -1));
    value = &*(stack_->end() - static_cast<int64_t>(op_.schema().arguments().size()));
    for (const auto& argument : op_.schema().arguments()) take(argument, *value++);
    run_seeded();
    host_.settle();
    for (const auto& tensor : written_) write(tensor, stream_);
    for (auto result = stack_->end() - static_cast<int64_t>(op_.schema().returns().size()); result != stack_->end();
         ++result) {
      if (result->isTensor()) *result = give(result->toTensor());
      else if (result->isTensorList()) *result = c10::fmap(result->toTensorVector(), [&](auto& t) { return give(t); });
    }
  }

 private:
  std::string name() const { return op_.schema().name(); }
  void find_device(const c10::Argument& argument, const c10::IValue& value) {
    if (value.isTensor()) find_device(argument, value.toTensor());
    else if (value.isTensorList()) for (const auto& tensor : value.toTensorVector()) find_device(argument, tensor);
    else if (value.isDevice() && value.toDevice().type() == kType) device_ = {kType, checked(value.toDevice().index())};
  }
  void find_device(const c10::Argument& argument, const Tensor& tensor) {
    if (is_ours(tensor) && !device_) device_ = tensor.device();
    const bool is_wrong = is_ours(tensor) ? *device_ != tensor.device()
                                          : tensor.defined() && tensor.is_cpu() && tensor.dim() > 0;
    if (!is_wrong || other_) return;
    other_name_ = argument.name();
    other_ = tensor.device();
  }
  void take(const c10::Argument& argument, c10::IValue& value) {
    const bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
    const auto on_host = [&](const Tensor& tensor) {
      const auto host = host_(tensor);
      if (is_written) written_.push_back(tensor);
      return is_written ? host : read(tensor, host, stream_, name());
    };
    if (value.isTensor()) value = on_host(value.toTensor());
    else if (value.isTensorList()) value = c10::fmap(value.toTensorVector(), on_host);
    else if (value.isOptionalTensorList()) {
      // Indices, which may be on the CPU.
      c10::List<std::optional<Tensor>> taken;
      for (const auto& tensor : value.toOptionalTensorVector()) taken.push_back(on_host(tensor.value_or(Tensor())));
      value = std::move(taken);
    } else if (value.isStorage() && value.toStorage().device_type() == kType) value = host_(value.toStorage());
    else if (value.isDevice()) {
      stays_on_host_ = value.toDevice().type() != kType;
      if (!stays_on_host_) value = Device(c10::kCPU);
    } else if (argument.name() == "generator") generator_ = &value;
  }
  void run_seeded() {
    const auto cpu = c10::DispatchKeySet(c10::DispatchKey::CPU);
    if (!op_.hasTag(at::Tag::nondeterministic_seeded)) return op_.redispatchBoxed(cpu, stack_);
    TORCH_CHECK(!other_, "Expected a 'cpu' device type for generator but found '", kType, "'");
    const bool has_own = generator_ && !generator_->isNone();
    const auto generator = has_own ? generator_->toGenerator() : default_generator(stream_.first);
    TORCH_CHECK(generator.device().type() == kType, "Expected a '", kType, "' device type for generator but found '",
        generator.device().type(), "'");
    const auto numbers = host_.tensors.empty() ? 1 : host_.tensors.back().first.numel();
    const auto seed = generator.get<Random>()->next_seed(numbers);
    if (generator_) {
      *generator_ = at::detail::createCPUGenerator(seed);
      return op_.redispatchBoxed(cpu, stack_);
    }
    // Operations without this argument, such as dropout's, use the default generator.
    auto cpu_generator = at::detail::getDefaultCPUGenerator();
    const auto state = cpu_generator.unsafeGetGeneratorImpl()->get_state();
    cpu_generator.set_current_seed(seed);
    op_.redispatchBoxed(cpu, stack_);
    cpu_generator.unsafeGetGeneratorImpl()->set_state(*state);
  }
  Tensor give(const Tensor& result) { return stays_on_host_ ? result : host_.back(result, stream_.first); }

  const c10::OperatorHandle& op_;
  Stack* const stack_;
  OnHost host_;
  std::optional<Device> device_, other_;
  std::string other_name_;
  StreamKey stream_;
  c10::IValue* generator_ = nullptr;
  bool stays_on_host_ = false;
  std::vector<Tensor> written_;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  Call(op, stack).run();
}

void no_sparse(const c10::OperatorHandle& op, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), ": ", kNoLayout, "Sparse");
}

// The host waits for what it reads.
void fallback_to_number(const c10::OperatorHandle& op, Stack* stack) {
  const auto stream = Streams::current_on(stack->back().toTensor().device().index());
  fallback(op, stack);
  streams.host_waits(streams.seen_by(stream));
}

// torch sends the convolutions of extensions to operations of their own; the backward one lacks the size of the bias.
void convolution(const c10::OperatorHandle& op, Stack* stack) {
  const bool is_backward = op.schema().arguments().size() == 10;
  if (is_backward) {
    const auto weight = stack->end()[-8].toTensor();
    const auto is_transposed = stack->end()[-4].toBool();
    const auto groups = stack->end()[-2].toInt();
    const auto size = is_transposed ? weight.size(1) * groups : weight.size(0);
    stack->insert(stack->end() - 7, c10::IValue(std::vector<int64_t>{size}));
  }
  const auto* name = is_backward ? "aten::convolution_backward" : "aten::convolution";
  fallback(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), stack);
}

Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto stream = Streams::current_on(is_ours(from) ? from.device().index() : to.device().index());
  OnHost host;
  const auto source = read(from, host(from), stream, "copy_"), target = host(to);
  if (is_ours(to)) {
    target.copy_(source);
    write(to, stream);
  } else if (streams.late && non_blocking && to.is_contiguous() && Pinned::contains(to.data_ptr())) {
    const auto copied = source.clone();
    std::memset(to.mutable_data_ptr(), 0xFF, to.nbytes());
    streams.copy_later(stream, [to = Tensor(to), copied] { to.copy_(copied); });
  } else {
    target.copy_(source);
    streams.host_waits(streams.seen_by(stream));
  }
  return to;
}

// The cells of LSTM and GRU, which torch asks of each extension. The workspace keeps what the backward starts from.
using TwoTensors = std::tuple<Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;
using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Optional = const std::optional<Tensor>&;

Tensor with_bias(const Tensor& gates, Optional bias) { return bias && bias->defined() ? gates + *bias : gates; }

ThreeTensors lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cx, Optional bias, Optional bias_h) {
  const auto gates = with_bias(input, bias) + with_bias(hidden, bias_h);
  const auto parts = gates.chunk(4, 1);
  const auto cy = parts[1].sigmoid() * cx + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * cy.tanh(), cy, gates};
}
ThreeTensors lstm_cell_backward(
    Optional grad_hy, Optional grad_cy, const Tensor& cx, const Tensor& cy, const Tensor& gates, bool has_bias) {
  const auto grads = at::_thnn_differentiable_lstm_cell_backward(
      grad_hy, grad_cy, gates, at::zeros_like(gates), std::nullopt, std::nullopt, cx, cy);
  const auto& of_gates = std::get<0>(grads);
  return {of_gates, std::get<2>(grads), has_bias ? of_gates.sum(0) : Tensor()};
}
TwoTensors gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& hx, Optional bias, Optional bias_h) {
  const auto in = with_bias(input, bias), past = with_bias(hidden, bias_h);
  const auto ins = in.chunk(3, 1), pasts = past.chunk(3, 1);
  const auto reset = (ins[0] + pasts[0]).sigmoid(), update = (ins[1] + pasts[1]).sigmoid();
  const auto fresh = (ins[2] + reset * pasts[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({in, past, hx}, 1)};
}
FiveTensors gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  const auto size = workspace.size(1) / 7;
  const auto in = workspace.narrow(1, 0, 3 * size), past = workspace.narrow(1, 3 * size, 3 * size);
  auto [of_in, of_past, of_hx, of_bias, of_bias_h] = at::_thnn_differentiable_gru_cell_backward(
      grad_hy, in, past, workspace.narrow(1, 6 * size, size), std::nullopt, std::nullopt);
  return {of_in, of_past, of_hx, has_bias ? of_in.sum(0) : Tensor(), has_bias ? of_past.sum(0) : Tensor()};
}

// SyncBatchNorm, whose parts the CPU does not have. Statistics are those of the channels, dimension 1.
std::vector<int64_t> other_dims(const Tensor& input) {
  std::vector<int64_t> dims(1);
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}
Tensor widened(const Tensor& tensor) { return tensor.to(at::toOpMathType(tensor.scalar_type())); }
Tensor along_channels(const Tensor& of_channels, const Tensor& input) {
  std::vector<int64_t> sizes(input.dim(), 1);
  sizes.at(1) = -1;
  return of_channels.view(sizes);
}

TwoTensors batch_norm_stats(const Tensor& input, double eps) {
  const auto x = widened(input);
  return {x.mean(other_dims(x)), (x.var(other_dims(x), false) + eps).rsqrt()};
}
TwoTensors batch_norm_gather_stats(const Tensor&, const Tensor& means, const Tensor& invstds, Optional running_mean,
    Optional running_var, double momentum, double eps, const Tensor& counts) {
  const auto count = counts.to(means.scalar_type()).view({-1, 1}), total = count.sum();
  const auto mean = (means * count).sum(0) / total;
  const auto var = ((invstds.pow(-2) - eps + (means - mean).square()) * count).sum(0) / total;
  if (running_mean && running_mean->defined()) running_mean->lerp_(mean.to(running_mean->scalar_type()), momentum);
  if (running_var && running_var->defined())
    running_var->lerp_((var * total / (total - 1)).to(running_var->scalar_type()), momentum);
  return {mean, (var + eps).rsqrt()};
}
Tensor batch_norm_elemt(const Tensor& input, Optional weight, Optional bias, const Tensor& mean, const Tensor& invstd,
    double) {
  auto x = (widened(input) - along_channels(mean, input)) * along_channels(invstd, input);
  if (weight && weight->defined()) x = x * along_channels(*weight, input);
  if (bias && bias->defined()) x = x + along_channels(*bias, input);
  return x.to(input.scalar_type());
}
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce(const Tensor& grad, const Tensor& input,
    const Tensor& mean, const Tensor& invstd, Optional, bool, bool, bool) {
  const auto dy = widened(grad);
  const auto sum = dy.sum(other_dims(dy));
  const auto sum_xmu = (dy * (widened(input) - along_channels(mean, input))).sum(other_dims(dy));
  return {sum, sum_xmu, sum_xmu * invstd, sum};
}
Tensor batch_norm_backward_elemt(const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    Optional weight, const Tensor& sum, const Tensor& sum_xmu, const Tensor& counts) {
  const auto total = counts.sum();
  const auto xmu = widened(input) - along_channels(mean, input);
  auto dx = widened(grad) - along_channels(sum / total, input) -
      xmu * along_channels(invstd.square() * sum_xmu / total, input);
  dx = dx * along_channels(invstd, input);
  if (weight && weight->defined()) dx = dx * along_channels(*weight, input);
  return dx.to(input.scalar_type());
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(Device(kType, checked(device ? device->index() : -1)));
  return at::detail::empty_generic_symint(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(Device(kType, checked(device ? device->index() : -1)));
  return at::detail::empty_strided_symint_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy);
  m.impl("_local_scalar_dense", torch::CppFunction::makeFromBoxedFunction<&fallback_to_number>());
  m.impl("record_stream", [](Tensor&, Stream) {});
  m.impl("_has_compatible_shallow_copy_type", [](const Tensor&, const Tensor&) { return true; });
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  // torch would call their variants with out=, which warn of the size that they give to it.
  for (const char* name : {"mse_loss", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("batch_norm_stats", batch_norm_stats);
  m.impl("batch_norm_gather_stats_with_counts", batch_norm_gather_stats);
  m.impl("batch_norm_elemt", batch_norm_elemt);
  m.impl("batch_norm_backward_reduce", batch_norm_backward_reduce);
  m.impl("batch_norm_backward_elemt", batch_norm_backward_elemt);
}
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&no_sparse>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&no_sparse>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define TO_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define TO_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define TO_FLOAT32_UNLESS_TOLD(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define TO_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(TO_LOWER_PRECISION)
  AT_FORALL_FP32(TO_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(TO_FLOAT32_UNLESS_TOLD)
  AT_FORALL_PROMOTE(TO_WIDEST)
}
}  // namespace
