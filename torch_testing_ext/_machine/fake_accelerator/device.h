// A device type that torch believes in, without hardware: its devices, streams and memory.
//
// A device pointer is a host pointer with a bit set that no address of a process has, and with the number of its
// device: a host that reads it gets SIGSEGV, as with hardware. Operations clear these bits and run on the CPU.

#pragma once
#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <sstream>

namespace {
using at::Tensor, c10::DataPtr, c10::Device, c10::DeviceIndex, c10::Storage, c10::Stream;
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 16;

const char* setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

// ---- devices: which ones this process sees, and whether it uses them

std::atomic<bool> is_started{false}, is_bad_fork{false};
thread_local DeviceIndex current = 0;

// The numbers of the visible devices. The mask is read as CUDA reads its own: up to the first unknown entry, and
// nothing is visible if a device is named twice. It is read until the first use: a forked child may still be masked.
std::vector<int> visible() {
  static std::mutex mutex;
  static std::vector<int> numbers;
  const std::lock_guard<std::mutex> lock(mutex);
  if (is_started) return numbers;
  numbers.clear();
  const int count = std::min(std::atoi(setting("TORCH_TESTING_EXT_FAKE_ACCELERATORS", "0")), kMostDevices);
  std::istringstream entries(setting("FAKEACC_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15"));
  for (std::string entry; std::getline(entries, entry, ',');) {
    char* end = nullptr;
    const long number = std::strtol(entry.c_str(), &end, 10);
    if (end == entry.c_str() || number < 0 || number >= count) break;
    if (std::count(numbers.begin(), numbers.end(), number)) return numbers = {};
    numbers.push_back(static_cast<int>(number));
  }
  return numbers;
}

// Every use of a device comes here first. Without a number, the device is the current one.
DeviceIndex checked(int device = -1) {
  TORCH_CHECK(!is_bad_fork, "Cannot re-initialize fake accelerators in forked subprocess. To use fake accelerators "
      "with multiprocessing, you must use the 'spawn' start method");
  const auto count = static_cast<int>(visible().size());
  TORCH_CHECK(count, "No fake accelerator is visible: FAKEACC_VISIBLE_DEVICES is '",
      setting("FAKEACC_VISIBLE_DEVICES", ""), "', and there are ", setting("TORCH_TESTING_EXT_FAKE_ACCELERATORS", "0"),
      ". Unset it, or name devices from 0 up");
  TORCH_CHECK(device < count, "invalid device ordinal ", device, ": there are ", count, " fake accelerators");
  is_started = true;
  return static_cast<DeviceIndex>(device < 0 ? current : device);
}

DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current; }

// ---- streams: all work is done at once
//
// With late streams, it counts as done only for those who have waited for it. Each stream has a clock that counts its
// operations, and knows how much of the other streams' work it has waited for, as does the host; an event is a copy.

using StreamKey = std::pair<DeviceIndex, c10::StreamId>;
using Seen = std::map<StreamKey, uint64_t>;
struct Event {
  Seen seen;
  std::chrono::steady_clock::time_point time;
};

StreamKey key_of(const Stream& stream) { return {stream.device_index(), stream.id()}; }

void merge(Seen& into, const Seen& from) {
  for (const auto& [stream, count] : from) into[stream] = std::max(into[stream], count);
}

class Streams {
 public:
  std::atomic<bool> late{std::string(setting("TORCH_TESTING_EXT_FAKE_LATE_STREAMS", "")) == "1"};
  static inline thread_local std::array<c10::StreamId, kMostDevices> current_ids{};

  static StreamKey current_on(DeviceIndex device) { return {device, current_ids.at(device)}; }
  Seen seen_by(StreamKey stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return clocks_[stream];
  }
  void wait(StreamKey stream, const Seen& seen) {
    const std::lock_guard<std::mutex> lock(mutex_);
    merge(clocks_[stream], seen);
  }
  void host_waits(const Seen& seen) {
    std::vector<std::function<void()>> due;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      merge(host_, seen);
      const auto is_due = [&](const Copy& copy) { return host_[copy.stream] >= copy.count; };
      for (const auto& copy : copies_) if (is_due(copy)) due.push_back(copy.finish);
      std::erase_if(copies_, is_due);
    }
    for (const auto& finish : due) finish();
  }
  void host_waits_for_device(DeviceIndex device) {
    Seen all;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [stream, seen] : clocks_) if (stream.first == device) merge(all, seen);
    }
    host_waits(all);
  }
  // An operation of this stream writes there.
  void write(StreamKey stream, const void* memory) {
    if (!late || !memory) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    writes_[memory] = {stream, ++clocks_[stream][stream]};
  }
  void forget(const void* memory) {
    if (!late) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    writes_.erase(memory);
  }
  // Has another stream written there, for which this one has not waited?
  bool is_unfinished(StreamKey stream, const void* memory) {
    if (!late) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto write = writes_.find(memory);
    if (write == writes_.end() || write->second.stream == stream) return false;
    merge(clocks_[stream], host_);
    return clocks_[stream][write->second.stream] < write->second.count;
  }
  // A copy to the host that is finished when the host has waited for its stream.
  void copy_later(StreamKey stream, std::function<void()> finish) {
    const std::lock_guard<std::mutex> lock(mutex_);
    copies_.push_back({stream, ++clocks_[stream][stream], std::move(finish)});
  }

 private:
  struct Write {
    StreamKey stream;
    uint64_t count;
  };
  struct Copy {
    StreamKey stream;
    uint64_t count;
    std::function<void()> finish;
  };
  std::mutex mutex_;
  std::map<StreamKey, Seen> clocks_;
  Seen host_;
  std::map<const void*, Write> writes_;
  std::vector<Copy> copies_;
};
Streams& streams = *new Streams;

// ---- memory

constexpr uintptr_t kTag = uintptr_t{1} << 52, kHostBits = (uintptr_t{1} << 48) - 1;
c10::Allocator* cpu_allocator() { return c10::GetAllocator(c10::kCPU); }
void* on_host(const void* data) { return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(data) & kHostBits); }

// How many bytes each process has on each device, in a file that all processes of a run share. A process locks its row;
// a row that nobody has locked is one of a process that has ended.
class SharedCounts {
 public:
  SharedCounts() : file_(open(setting("_TORCH_TESTING_EXT_FAKE_MEMORY_FILE", ""), O_RDWR | O_CLOEXEC)) {
    void* start = mmap(nullptr, kRows * sizeof(Row), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (file_ >= 0 && start != MAP_FAILED) rows_ = static_cast<Row*>(start);
  }
  void add(int device, int64_t bytes) {
    if (!is_bad_fork) (*own_row())[device] += bytes;
  }
  // Takes no row: who has only asked may fork children that use devices.
  int64_t total(int device) const {
    int64_t sum = alone_[device];
    for (int row = 0; rows_ && row < kRows; ++row) {
      const bool counts = rows_[row][device] != 0 && (&rows_[row] == own_ || !lock(row, F_GETLK));
      if (counts) sum += rows_[row][device];
    }
    return sum;
  }
  // In a fork: what the parent has is its own, also what the child frees.
  void leave_to_parent() { own_ = nullptr; }

 private:
  using Row = std::array<std::atomic<int64_t>, kMostDevices>;
  static constexpr int kRows = 256;
  // For F_SETLK: is it locked now? For F_GETLK: could it be locked?
  bool lock(int row, int command) const {
    struct flock range = {F_WRLCK, SEEK_SET, row, 1, 0};
    return !fcntl(file_, command, &range) && (command == F_SETLK || range.l_type == F_UNLCK);
  }
  Row* own_row() {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (int row = 0; rows_ && !own_ && row < kRows; ++row) if (lock(row, F_SETLK)) own_ = &rows_[row], clear(*own_);
    return own_ ? own_ : own_ = &alone_;
  }
  // What a process had that has ended.
  static void clear(Row& row) { for (auto& bytes : row) bytes = 0; }
  const int file_;
  Row* rows_ = nullptr;
  Row* own_ = nullptr;
  Row alone_{};
  std::mutex mutex_;
};
SharedCounts& shared_counts = *new SharedCounts;

class Memory final : public c10::DeviceAllocator {
 public:
  DataPtr allocate(size_t size) override {
    const auto device = checked();
    check_room(device, size);
    return adopt(Storage({}, size, cpu_allocator()), device);
  }
  // Memory that the host has allocated becomes that of a device.
  DataPtr adopt(const Storage& host, DeviceIndex device) {
    check_room(checked(device), host.nbytes());
    count(device, static_cast<int64_t>(host.nbytes()));
    const auto data = reinterpret_cast<uintptr_t>(host.data());
    const auto address = data ? data | kTag | uintptr_t(device) << 48 : 0;
    return {reinterpret_cast<void*>(address), new Block{host, device}, &release, Device(kType, device)};
  }
  // Gives a storage of a device the memory of one of the host.
  void replace(const Storage& device, const Storage& host) {
    device.set_data_ptr_noswap(adopt(host, device.device().index()));
    device.set_nbytes(host.nbytes());
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(on_host(to), on_host(from), n); }
  bool initialized() override { return is_started; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override { return stats_.at(device); }
  void resetAccumulatedStats(DeviceIndex device) override {
    for_each_stat(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(DeviceIndex device) override {
    for_each_stat(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    const auto used = static_cast<size_t>(shared_counts.total(visible().at(device)));
    return {size_ - std::min(used, size_), size_};
  }

 private:
  struct Block {
    Storage host;
    DeviceIndex device;
  };
  static void release(void* context);
  void check_room(DeviceIndex device, size_t size) {
    const auto [free, all] = getMemoryInfo(device);
    TORCH_CHECK_WITH(OutOfMemoryError, size <= free, "Fake accelerator ", int(device), " is out of memory. Tried to "
        "allocate ", size, " bytes; ", free, " of ", all, " are free");
  }
  void count(DeviceIndex device, int64_t bytes) {
    shared_counts.add(visible().at(device), bytes);
    for_each_stat(device, [&](auto& stat) { bytes < 0 ? stat.decrease(-bytes) : stat.increase(bytes); });
  }
  template <class Function> void for_each_stat(DeviceIndex device, Function function) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = stats_.at(device);
    for (auto* stat : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) function((*stat)[0]);
  }
  const size_t size_ = std::strtoull(setting("TORCH_TESTING_EXT_FAKE_MEMORY", "17179869184"), nullptr, 10);
  std::mutex mutex_;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kMostDevices> stats_;
};
Memory& memory = *new Memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory)

void Memory::release(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  streams.forget(block->host.data());
  memory.count(block->device, -static_cast<int64_t>(block->host.nbytes()));
}
}  // namespace
