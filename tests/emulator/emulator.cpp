// An accelerator emulated on the CPU, device type "emu", for tests of what an accelerator does otherwise than a CPU:
//
// - Streams run beside the host: copies and the results of kernels land late, in the order of their stream, so that who
//   does not wait for them reads what was there before.
// - Memory that is freed is poisoned (NaN), in the order of the stream it was allocated on; new memory is poison too.
// - Device addresses carry a tag, so that host code that follows one faults.
// - Copies between the device and pageable memory wait; those of pinned memory do not, if asked not to.
//
// Kernels are the CPU's (cpu_fallback).

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace {

constexpr auto EMU = c10::DeviceType::PrivateUse1;
constexpr uintptr_t TAG = uintptr_t(1) << 62;
constexpr int NUM_STREAMS = 32;
const c10::Device DEVICE(EMU, 0);

std::atomic<int> copy_delay{500};   // microseconds
std::atomic<int> kernel_delay{0};
std::atomic<size_t> total_memory{size_t(1) << 32};

void* real(const void* address) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) & ~TAG);
}
bool tagged(const void* address) {
  return reinterpret_cast<uintptr_t>(address) & TAG;
}

// Streams and events

struct Mark {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::chrono::steady_clock::time_point when;
  void set() {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
    when = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return done; });
  }
  bool query() {
    std::lock_guard<std::mutex> lock(mutex);
    return done;
  }
};

struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  size_t under_way = 0;
  bool started = false;

  void push(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!started) {
      started = true;
      std::thread([this] { serve(); }).detach();
    }
    tasks.push_back(std::move(task));
    ++under_way;
    changed.notify_all();
  }
  void serve() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return !tasks.empty(); });
      auto task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
      --under_way;
      changed.notify_all();
    }
  }
  void drain() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return under_way == 0; });
  }
  bool idle() {
    std::lock_guard<std::mutex> lock(mutex);
    return under_way == 0;
  }
};

// Never destroyed: threads wait on them until the process ends.
Queue* queues() {
  static auto* found = new Queue[NUM_STREAMS];
  return found;
}
thread_local c10::StreamId current_stream = 0;
std::atomic<int> last_stream{0};

void enqueue(c10::StreamId stream, int delay, std::function<void()> task) {
  queues()[stream].push([delay, task = std::move(task)] {
    if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
    task();
  });
}
void wait_for(c10::StreamId stream) {
  if (PyGILState_Check()) {
    pybind11::gil_scoped_release released;
    queues()[stream].drain();
  } else {
    queues()[stream].drain();
  }
}
std::shared_ptr<Mark> mark(c10::StreamId stream) {
  auto found = std::make_shared<Mark>();
  queues()[stream].push([found] { found->set(); });
  return found;
}

// Memory

struct Block {
  void* memory;
  size_t size;
  c10::StreamId stream;
  std::vector<c10::StreamId> users;
};

std::mutex counting;
c10::CachingDeviceAllocator::DeviceStats stats;

void count(int64_t size) {
  std::lock_guard<std::mutex> lock(counting);
  for (auto* array : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes}) {
    auto& stat = (*array)[0];
    if (size > 0) stat.increase(size);
    else stat.decrease(-size);
  }
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  count(-int64_t(block->size));
  std::vector<std::shared_ptr<Mark>> marks;
  for (auto stream : block->users) marks.push_back(mark(stream));
  // What comes next in the order of the stream may have the memory.
  queues()[block->stream].push([block, marks] {
    for (auto& found : marks) found->wait();
    std::memset(block->memory, 0xff, block->size);
    std::free(block->memory);
    delete block;
  });
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, [](void*) {}, DEVICE};
    size_t now;
    {
      std::lock_guard<std::mutex> lock(counting);
      now = stats.allocated_bytes[0].current;
    }
    TORCH_CHECK_WITH(OutOfMemoryError, now + size <= total_memory, "emu out of memory");
    auto* block = new Block{nullptr, size, current_stream, {}};
    TORCH_CHECK(posix_memalign(&block->memory, 64, size) == 0, "no memory");
    std::memset(block->memory, 0xff, size);
    count(size);
    return {reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(block->memory) | TAG), block, &free_block, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    enqueue(current_stream, kernel_delay, [=] { std::memcpy(real(to), real(from), size); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() == &free_block) {
      auto* block = static_cast<Block*>(data.get_context());
      if (stream.id() != block->stream) block->users.push_back(stream.id());
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(counting);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(counting);
    for (auto* array : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes})
      (*array)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(counting);
    return {total_memory - stats.allocated_bytes[0].current, total_memory};
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(EMU, &allocator);

// Pinned memory: what is freed is kept until the copies under way from or to it are done, as torch's cache of it does.

struct Pinned {
  void* memory;
  size_t size;
  int copies = 0;
  bool freed = false;
};
std::mutex pinning;
std::map<uintptr_t, Pinned*>& pinned_blocks() {
  static auto* found = new std::map<uintptr_t, Pinned*>();
  return *found;
}

Pinned* pinned(const void* address) {
  auto& blocks = pinned_blocks();
  auto found = blocks.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (found == blocks.begin()) return nullptr;
  auto* block = (--found)->second;
  return reinterpret_cast<uintptr_t>(address) < found->first + std::max<size_t>(1, block->size) ? block : nullptr;
}
void settle(Pinned* block) {  // with the lock
  if (!block->freed || block->copies) return;
  pinned_blocks().erase(reinterpret_cast<uintptr_t>(block->memory));
  std::memset(block->memory, 0xff, block->size);
  std::free(block->memory);
  delete block;
}

struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, [](void*) {}, c10::Device(c10::kCPU)};
    auto* block = new Pinned{nullptr, size};
    TORCH_CHECK(posix_memalign(&block->memory, 64, size) == 0, "no memory");
    std::memset(block->memory, 0xff, size);
    std::lock_guard<std::mutex> lock(pinning);
    pinned_blocks()[reinterpret_cast<uintptr_t>(block->memory)] = block;
    return {block->memory, block, &release, c10::Device(c10::kCPU)};
  }
  static void release(void* context) {
    std::lock_guard<std::mutex> lock(pinning);
    auto* block = static_cast<Pinned*>(context);
    block->freed = true;
    settle(block);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
HostAllocator host_allocator;

// Generators: those of the CPU with a state of their own

struct Generator : at::CPUGeneratorImpl {
  Generator() {
    device_ = DEVICE;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
at::Generator& default_generator() {
  static auto* found = new at::Generator(at::make_generator<Generator>());
  return *found;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(pinning);
    return pinned(data) != nullptr;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    TORCH_CHECK(index == 0, "emu has one device, not ", int(index) + 1);
  }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = allocator.allocate(size);
    size_t kept = std::min(size, storage.nbytes());
    if (kept) allocator.copy_data(fresh.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return EMU; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device device) const override { TORCH_CHECK(device.index() <= 0, "emu has one device"); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(1 + last_stream++ % (NUM_STREAMS - 1)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream wanted) const override {
    auto before = current_stream;
    current_stream = wanted.id();
    return stream(before);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return queues() + stream.id(); }
  using Event = std::shared_ptr<Mark>;
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    *static_cast<Event*>(*event) = mark(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    queues()[stream.id()].push([mark = *static_cast<Event*>(event)] { mark->wait(); });
  }
  bool queryEvent(void* event) const override { return !event || (*static_cast<Event*>(event))->query(); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto mark = *static_cast<Event*>(event);
    if (PyGILState_Check()) {
      pybind11::gil_scoped_release released;
      mark->wait();
    } else {
      mark->wait();
    }
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto begin = *static_cast<Event*>(first), end = *static_cast<Event*>(second);
    TORCH_CHECK(begin->query() && end->query(), "both events must be over");
    return std::chrono::duration<double, std::milli>(end->when - begin->when).count();
  }
  bool queryStream(const c10::Stream& stream) const override { return queues()[stream.id()].idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for(stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    for (int id = 0; id < NUM_STREAMS; ++id) wait_for(id);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator.recordStream(data, stream);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Operators

thread_local bool in_kernel = false;

at::Tensor same_memory(const at::Tensor& tensor) {  // the same memory, which it does not hold
  return at::from_blob(
      real(tensor.data_ptr()), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).pinned_memory(false));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (!target.numel()) return target;
  at::AutoDispatchBelowADInplaceOrView below;
  bool to_device = source.device().is_cpu(), to_host = target.device().is_cpu();
  // What a kernel computed lands late. Its source is nobody else's; other memory of the host may be Python's, so it is
  // not held here: pinned memory is kept as torch's cache keeps it, for pageable memory the copy is waited for.
  bool kernel = in_kernel && !to_host;
  Pinned* block = nullptr;
  if ((to_device || to_host) && !kernel) {
    std::lock_guard<std::mutex> lock(pinning);
    block = pinned((to_device ? source : target).data_ptr());
    if (block) ++block->copies;
  }
  int delay = in_kernel ? (to_host ? 0 : kernel_delay.load()) : to_device || to_host ? copy_delay.load() : kernel_delay.load();
  auto held = kernel && to_device ? source : at::Tensor();
  enqueue(current_stream, delay, [from = same_memory(source.expand(target.sizes())), to = same_memory(target), block, held] {
    {
      at::AutoDispatchBelowADInplaceOrView below;
      at::Tensor(to).copy_(from);
    }
    if (!block) return;
    std::lock_guard<std::mutex> lock(pinning);
    --block->copies;
    settle(block);
  });
  if ((to_device || to_host) && !kernel && !(block && non_blocking)) wait_for(current_stream);
  return target;
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef wanted, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(wanted);
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  size_t needed = (impl->storage_offset() + impl->numel()) * tensor.itemsize();
  if (needed > tensor.storage().nbytes()) Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
  return tensor;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
at::Tensor empty(
    c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}
at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->expect_int();
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), start);
}
at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef sizes) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes));
}
at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}
at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes,
                        c10::SymIntArrayRef strides) {
  return at::native::set_storage_cpu_(
      tensor, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}
at::Tensor& set_source_storage(at::Tensor& tensor, at::Storage storage) {
  int64_t length = storage.nbytes() / tensor.itemsize();
  return at::native::set_storage_cpu_(tensor, storage, 0, {length}, {});
}
at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return at::native::set_tensor_(tensor, source);
}
void record_stream(at::Tensor& tensor, c10::Stream stream) {
  allocator.recordStream(tensor.storage().data_ptr(), stream);
}

std::atomic<int64_t> num_kernels{0};

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++num_kernels;
  const auto& arguments = op.schema().arguments();
  std::optional<at::Generator> theirs, ours;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto type = arguments[i].type();
    auto optional = type->cast<c10::OptionalType>();
    bool takes = type->kind() == c10::TypeKind::GeneratorType ||
        (optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType);
    if (!takes) continue;
    auto& value = (*stack)[stack->size() - arguments.size() + i];
    ours = value.isNone() ? default_generator() : value.toGenerator();
    if (ours->device().is_cpu()) continue;
    theirs = at::make_generator<at::CPUGeneratorImpl>();
    theirs->set_state(ours->get_state());
    value = c10::IValue(*theirs);
  }
  bool before = in_kernel;
  in_kernel = true;
  wait_for(current_stream);
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    in_kernel = before;
    throw;
  }
  in_kernel = before;
  if (theirs) ours->set_state(theirs->get_state());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_source_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("delays", [](int copies, int kernels) { copy_delay = copies; kernel_delay = kernels; });
  m.def("set_total_memory", [](size_t size) { total_memory = size; });
  m.def("num_kernels", [] { return num_kernels.load(); });
  m.def("default_generator", [] { return default_generator(); });
}
