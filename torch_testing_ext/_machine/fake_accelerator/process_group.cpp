// The backend "fakeccl": gloo's collectives, on the host's view of the tensors; and the module that Python imports.
//
// It includes the other files: torch's headers take most of the time, and are compiled once so.

#include "operations.h"
#include <pthread.h>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

namespace {
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Future = c10::ivalue::Future;

// Work on the stream of its group: the stream that waits for it is the current one, as with NCCL.
class StagedWork final : public c10d::Work {
 public:
  StagedWork(WorkPtr inner, std::vector<std::pair<Tensor, Tensor>> outputs, StreamKey stream)
      : inner_(std::move(inner)), outputs_(std::move(outputs)), stream_(stream) {
    const auto devices = c10::fmap(outputs_, [](auto& pair) { return pair.first.device(); });
    future_ = c10::make_intrusive<Future>(c10::ListType::ofTensors(), devices);
  }
  int sourceRank() const override { return inner_->sourceRank(); }
  Tensors result() override { return c10::fmap(outputs_, [](auto& pair) { return pair.first; }); }
  c10::intrusive_ptr<Future> getFuture() override { return future_; }
  void synchronize() override { streams.wait(Streams::current_on(stream_.first), streams.seen_by(stream_)); }
  // In a thread of its own. A mean, which gloo lacks, is a sum that is divided.
  void finish_after_inner(int divisor) {
    pthread_setname_np(pthread_self(), "fakeccl");
    // The events of the future are those of the group's stream.
    current = stream_.first;
    Streams::current_ids.at(current) = stream_.second;
    std::exception_ptr error;
    try {
      const at::AutoDispatchBelowADInplaceOrView below;
      inner_->wait();
      for (auto& [device, host] : outputs_) if (divisor > 1) host.div_(divisor);
    } catch (...) {
      error = std::current_exception();
    }
    error ? future_->setError(error) : future_->markCompleted(result());
    finish(error);
  }

 private:
  const WorkPtr inner_;
  const std::vector<std::pair<Tensor, Tensor>> outputs_;
  const StreamKey stream_;
  c10::intrusive_ptr<Future> future_;
};

class StagedBackend final : public c10d::Backend {
 public:
  // Without a store, ranks may share devices.
  StagedBackend(const BackendPtr& gloo, StorePtr store)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(gloo), store_(std::move(store)) {}
  const std::string getBackendName() const override { return "fakeccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return named_gloo()->barrier(options); }
  WorkPtr send(Tensors& from, int rank, int tag) override { return run<false>(&Backend::send, tag, from, rank); }
  WorkPtr recv(Tensors& to, int rank, int tag) override { return run(&Backend::recv, tag, to, rank); }
  WorkPtr recvAnysource(Tensors& to, int tag) override { return run(&Backend::recvAnysource, tag, to); }

#define IN_PLACE(name, Kind) \
  WorkPtr name(Tensors& both, const c10d::Kind##Options& options) override { \
    return run(&Backend::name, options, both); \
  }
#define FROM_TO(name, To, From, Kind) \
  WorkPtr name(To& to, From& from, const c10d::Kind##Options& options) override { \
    return run(&Backend::name, options, to, from); \
  }
// gloo cuts the first dimension into parts, NCCL the memory.
#define FLAT_FROM_TO(name, Kind) \
  WorkPtr name(Tensor& to, Tensor& from, const c10d::Kind##Options& options) override { \
    const bool are_flat = to.is_contiguous() && from.is_contiguous(); \
    auto flat_to = are_flat ? to.view(-1) : to, flat_from = are_flat ? from.view(-1) : from; \
    return run(&Backend::name, options, flat_to, flat_from); \
  }
  IN_PLACE(broadcast, Broadcast)
  IN_PLACE(reduce, Reduce)
  IN_PLACE(allreduce, Allreduce)
  IN_PLACE(allreduce_coalesced, AllreduceCoalesced)
  FROM_TO(alltoall, Tensors, Tensors, AllToAll)
  FROM_TO(gather, Lists, Tensors, Gather)
  FROM_TO(scatter, Tensors, Lists, Scatter)
  FROM_TO(allgather, Lists, Tensors, Allgather)
  FLAT_FROM_TO(_allgather_base, Allgather)
  FROM_TO(allgather_coalesced, Lists, Tensors, Allgather)
  FROM_TO(allgather_into_tensor_coalesced, Tensors, Tensors, Allgather)
  FROM_TO(reduce_scatter, Tensors, Lists, ReduceScatter)
  FLAT_FROM_TO(_reduce_scatter_base, ReduceScatter)
  FROM_TO(reduce_scatter_tensor_coalesced, Tensors, Tensors, ReduceScatter)
  WorkPtr alltoall_base(Tensor& to, Tensor& from, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
      const c10d::AllToAllOptions& options) override {
    return run(&Backend::alltoall_base, options, to, from, to_sizes, from_sizes);
  }

 private:
  // `first` is what the collective writes to, unless it only reads.
  template <bool kWrites = true, class Method, class Options, class First, class... More>
  WorkPtr run(Method method, Options options, First& first, More&... more) {
    OnHost host(false);
    auto to = host(first);
    const auto outputs = host.tensors;
    std::tuple<More...> others{host(more)...};
    const auto stream = begin(host);
    int divisor = 1;
    if constexpr (requires { options.reduceOp; }) {
      if (options.reduceOp == c10d::ReduceOp::AVG) {
        options.reduceOp = c10d::ReduceOp::SUM;
        divisor = size_;
      }
    }
    auto* const gloo = named_gloo();
    auto inner = std::apply([&](auto&... rest) { return (gloo->*method)(to, rest..., options); }, others);
    for (const auto& pair : outputs) if (kWrites) write(pair.first, stream);
    auto work = c10::make_intrusive<StagedWork>(inner, outputs, stream);
    // Not all of gloo's work has a future.
    std::thread([work, divisor] { work->finish_after_inner(divisor); }).detach();
    return work;
  }
  // The group's stream waits for the current one, and reads what it may.
  StreamKey begin(OnHost& host) {
    const auto device = host.tensors.empty() ? current : host.tensors.front().first.device().index();
    claim(device);
    const StreamKey stream{device, -1 - getID() % kMostGroups};
    streams.wait(stream, streams.seen_by(Streams::current_on(device)));
    for (auto& [tensor, on_host] : host.tensors) {
      const auto seen = read(tensor, on_host, stream, "a collective");
      // Some reduce in place: the wrong numbers have to be in the tensor itself.
      if (!seen.is_same(on_host)) on_host.copy_(seen);
    }
    return stream;
  }
  // A device is used by one rank of a group, as with NCCL.
  void claim(DeviceIndex device) {
    if (!store_ || !claimed_.insert(device).second) return;
    const auto rank = std::to_string(rank_);
    std::string owner;
    try {
      owner = store_->compareSet("fakeccl/" + std::to_string(visible().at(device)), std::string(), rank);
    } catch (const std::exception&) {
      // Its server has ended: what this rank lacks is said by its collective.
      return;
    }
    TORCH_CHECK(owner == rank, "Duplicate device detected: rank ", rank, " and rank ", owner, " both use ",
        Device(kType, device), " in a collective. Use the device of the rank");
  }
  // gloo records for this backend. Its entries need the name of the group, which torch gives to this one alone, and are
  // told from those of a gloo of the same group by the description.
  c10d::Backend* named_gloo() {
    gloo_->setGroupUid(getGroupUid());
    gloo_->setGroupDesc(getBackendName());
    return gloo_.get();
  }
  static constexpr int64_t kMostGroups = 1 << 30;
  const BackendPtr gloo_;
  const StorePtr store_;
  std::set<DeviceIndex> claimed_;
};
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  pthread_atfork(nullptr, nullptr, [] {
    is_bad_fork = is_bad_fork || is_started;
    shared_counts.leave_to_parent();
  });
  at::RegisterPrivateUse1HooksInterface(new Driver);
  module.def("visible", &visible);
  module.def("start", [] { checked(); });
  module.def("is_started", [] { return is_started.load(); });
  module.def("is_bad_fork", [] { return is_bad_fork.load(); });
  module.def("set_late_streams", [](bool late) { streams.late = late; });
  module.def("memory_info", [](DeviceIndex device) { return memory.getMemoryInfo(device); });
  module.def("default_stream", [](DeviceIndex device) { return Driver().getDefaultStream({kType, device}); });
  module.def("default_generator", [](DeviceIndex device) { return default_generator(device); });
  module.def("stage", [](const BackendPtr& gloo, const StorePtr& store) {
    return BackendPtr(c10::make_intrusive<StagedBackend>(gloo, store));
  });
}
