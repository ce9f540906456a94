// What torch asks of the driver of a device: pinned memory, random numbers, the current device and stream, and events.

#pragma once
#include "device.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace {
// Memory of the host that counts as pinned.
class Pinned final : public c10::Allocator {
 public:
  DataPtr allocate(size_t size) override {
    auto data = cpu_allocator()->allocate(size);
    const std::lock_guard<std::mutex> lock(mutex_);
    auto* start = static_cast<char*>(data.get());
    ends_[start] = start + std::max<size_t>(size, 1);
    return {start, new DataPtr(std::move(data)), &release, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  static bool contains(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto after = ends_.upper_bound(static_cast<const char*>(data));
    return after != ends_.begin() && std::prev(after)->second > data;
  }

 private:
  static void release(void* context) {
    const std::unique_ptr<DataPtr> data(static_cast<DataPtr*>(context));
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_.erase(static_cast<const char*>(data->get()));
  }
  static inline std::mutex mutex_;
  static inline std::map<const char*, const char*> ends_;
};

// Random numbers: a state of seed and offset, as CUDA's, which gives each operation a seed for a generator of the CPU.
class Random final : public c10::GeneratorImpl {
 public:
  using State = std::array<uint64_t, 2>;
  explicit Random(DeviceIndex device, State state = {c10::default_rng_seed_val, 0})
      : GeneratorImpl(Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), state_(state) {}
  static c10::DeviceType device_type() { return kType; }
  void set_current_seed(uint64_t seed) override { state_ = {seed, 0}; }
  void set_offset(uint64_t offset) override { state_[1] = offset; }
  uint64_t get_offset() const override { return state_[1]; }
  uint64_t current_seed() const override { return state_[0]; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state_[0];
  }
  void set_state(const c10::TensorImpl& from) override {
    TORCH_CHECK(from.numel() == sizeof state_ && from.is_cpu(), "RNG state is wrong size, or is not on the CPU");
    std::memcpy(state_.data(), from.data(), sizeof state_);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto made = at::detail::empty_cpu({sizeof state_}, at::kByte);
    std::memcpy(made.mutable_data_ptr(), state_.data(), sizeof state_);
    return made.getIntrusivePtr();
  }
  Random* clone_impl() const override { return new Random(device_.index(), state_); }
  uint64_t next_seed(int64_t numbers) {
    const auto offset = std::exchange(state_[1], state_[1] + (numbers + 3) / 4 * 4);
    return state_[0] ^ (offset * 0x9E3779B97F4A7C15ull >> 32);
  }

 private:
  State state_;
};

const at::Generator& default_generator(DeviceIndex device) {
  static auto& generators = *new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (DeviceIndex index = 0; index < kMostDevices; ++index) made.push_back(at::make_generator<Random>(index));
    return made;
  }());
  return generators.at(device < 0 ? current : device);
}

class Driver final : public c10::impl::DeviceGuardImplInterface, public at::PrivateUse1HooksInterface {
 public:
  // -- devices
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !visible().empty(); }
  void init() const override { checked(); }
  bool hasPrimaryContext(DeviceIndex) const override { return is_started; }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(visible().size()); }
  c10::DeviceType type() const override { return kType; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  Device getDevice() const override { return {kType, current}; }
  Device getDeviceFromPtr(void* data) const override {
    return {kType, static_cast<DeviceIndex>(reinterpret_cast<uintptr_t>(data) >> 48 & 15)};
  }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setDevice(Device device) const override { current = checked(device.index()); }
  void setCurrentDevice(DeviceIndex device) const override { current = checked(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Device exchangeDevice(Device to) const override { return {kType, std::exchange(current, checked(to.index()))}; }
  DeviceIndex exchangeDevice(DeviceIndex to) const override { return std::exchange(current, checked(to)); }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return to < 0 ? current : exchangeDevice(to); }

  // -- memory and random numbers
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Random>(checked(device));
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto* allocator = new Pinned;
    return allocator;
  }
  bool isPinnedPtr(const void* data) const override { return Pinned::contains(data); }
  void resizePrivateUse1Bytes(const Storage& storage, size_t size) const override {
    const Storage host({}, size, cpu_allocator());
    if (const auto kept = std::min(size, storage.nbytes())) memory.copy_data(host.mutable_data(), storage.data(), kept);
    memory.replace(storage, host);
  }

  // -- streams and events
  Stream getStream(Device device) const override { return make(device, Streams::current_ids.at(index_of(device))); }
  Stream getDefaultStream(Device device) const override { return make(device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return make(device, ++last_id_); }
  Stream getNewStream(Device device, int) const override { return make(device, ++last_id_); }
  Stream exchangeStream(Stream next) const override {
    return make(next.device(), std::exchange(Streams::current_ids.at(next.device_index()), next.id()));
  }
  bool queryStream(const Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override { streams.host_waits(streams.seen_by(key_of(stream))); }
  void synchronizeDevice(DeviceIndex device) const override { streams.host_waits_for_device(device); }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {streams.seen_by(key_of(stream)), std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    if (event) streams.wait(key_of(stream), static_cast<Event*>(event)->seen);
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) streams.host_waits(static_cast<Event*>(event)->seen);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* start, void* end, DeviceIndex) const override {
    const auto passed = static_cast<Event*>(end)->time - static_cast<Event*>(start)->time;
    return std::chrono::duration<double, std::milli>(passed).count();
  }

 private:
  static Stream make(Device device, c10::StreamId id) { return Stream(Stream::UNSAFE, {kType, index_of(device)}, id); }
  static inline std::atomic<c10::StreamId> last_id_{0};
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Driver)
}  // namespace
