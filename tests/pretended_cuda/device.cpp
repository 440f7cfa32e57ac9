// A CUDA that is not there: device memory is host memory, streams are queues that run late, and a missing wait gives
// wrong numbers. For the CUDA key of a CPU build of torch: guard, allocators, generators, hooks, and one boxed kernel
// for all operations, so that unmodified code with `device="cuda"` runs.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <set>

namespace pretended {

using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using torch::jit::Stack;
using Hold = std::unique_lock<std::mutex>;
using Stat = c10::CachingAllocator::StatType;

// ---- Memory

struct Block {
  char* bytes;
  size_t size;
  QueueKey home; // of the stream that allocated it, which alone may use it without record_stream
  std::set<QueueKey> users;
  std::vector<Point> used_until;
};

struct Memory {
  std::map<QueueKey, std::multimap<size_t, Block*>> free_blocks;
  std::vector<Block*> held; // freed, but recorded on a stream that has not got there
  std::map<int, c10::CachingDeviceAllocator::DeviceStats> stats;
  size_t limit = size_t(8) << 30; // of each device
};
static Memory* the_memory = new Memory;
static std::mutex memory_lock; // taken before the queues' lock, never after it

static void change(int device, bool reserved, int64_t bytes) {
  auto& stats = the_memory->stats[device];
  auto& sum = (reserved ? stats.reserved_bytes : stats.allocated_bytes)[size_t(Stat::AGGREGATE)];
  auto& count = (reserved ? stats.segment : stats.allocation)[size_t(Stat::AGGREGATE)];
  bytes >= 0 ? (sum.increase(bytes), count.increase(1)) : (sum.decrease(-bytes), count.decrease(1));
}

static void poison(Block* block) { // NaN in every dtype
  enqueue(block->home, [block] { memset(block->bytes, 0xFF, block->size); });
}

// Let its stream use a block again. What a later user might do is done at once in the default stream, and by the next
// user in others: torch's fully_shard frees gradients of a side stream before that stream has waited for the optimizer.
static void give_back(Block* block) {
  if (block->home.second == 0) poison(block);
  std::unique_lock<std::mutex> hold(memory_lock);
  the_memory->free_blocks[block->home].emplace(block->size, block);
}

static void release(void* context) {
  if (state().forked) return;
  auto* block = static_cast<Block*>(context);
  std::vector<Point> used_until;
  for (auto& user : block->users) used_until.push_back(end_of(user));
  std::unique_lock<std::mutex> hold(memory_lock);
  change(block->home.first, false, -int64_t(block->size));
  block->users.clear();
  block->used_until = used_until;
  if (!used_until.empty()) {
    the_memory->held.push_back(block);
    return;
  }
  hold.unlock();
  give_back(block);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  DataPtr allocate(size_t size) override {
    TORCH_CHECK(!state().forked, "Cannot re-initialize CUDA in forked subprocess (pretended device)");
    take_back();
    int device = current_device();
    std::unique_lock<std::mutex> hold(memory_lock);
    auto& memory = *the_memory;
    size = std::max<size_t>((size + 511) / 512 * 512, 512);
    auto home = current_queue();
    auto& pool = memory.free_blocks[home];
    Block* block;
    bool is_reused = false;
    if (auto found = pool.find(size); found != pool.end()) { // of the same size, the oldest: reused as soon as allowed
      block = found->second;
      is_reused = true;
      pool.erase(found);
    } else {
      auto live = memory.stats[device].allocated_bytes[size_t(Stat::AGGREGATE)].current;
      TORCH_CHECK_WITH(
          OutOfMemoryError, live + int64_t(size) <= int64_t(memory.limit), "CUDA out of memory (pretended device). Tried to allocate ",
          size, " bytes; ", live, " of ", memory.limit, " are in use.");
      block = new Block{static_cast<char*>(aligned_alloc(512, size)), size, home, {}, {}};
      memset(block->bytes, 0xFF, size);
      change(device, true, size);
    }
    change(device, false, size);
    hold.unlock();
    if (is_reused && home.second != 0) poison(block);
    return {block->bytes, block, &release, Device(CUDA, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    wait_for_device(-1);
    memcpy(to, from, size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    wait_for_device(-1);
    take_back();
    wait_for_device(-1);
    std::unique_lock<std::mutex> hold(memory_lock);
    for (auto& [home, pool] : the_memory->free_blocks) {
      for (auto& [size, block] : pool) {
        change(home.first, true, -int64_t(size));
        free(block->bytes);
        delete block;
      }
      pool.clear();
    }
  }
  void recordStream(const DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get_deleter() != &release || !pointer.get_context()) return;
    auto* block = static_cast<Block*>(pointer.get_context());
    QueueKey key{stream.device_index(), stream.id()};
    std::unique_lock<std::mutex> hold(memory_lock);
    if (block->home != key) block->users.insert(key);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::unique_lock<std::mutex> hold(memory_lock);
    return the_memory->stats[device];
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    std::unique_lock<std::mutex> hold(memory_lock);
    auto& stats = the_memory->stats[device];
    for (auto* all : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.allocation, &stats.segment})
      for (auto& stat : *all) stat.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::unique_lock<std::mutex> hold(memory_lock);
    auto reserved = the_memory->stats[device].reserved_bytes[size_t(Stat::AGGREGATE)].current;
    return {the_memory->limit - std::min<size_t>(reserved, the_memory->limit), the_memory->limit};
  }

 private:
  // Free what was held for streams that have got there by now.
  void take_back() {
    std::vector<Block*> ready;
    {
      std::unique_lock<std::mutex> hold(memory_lock);
      auto& held = the_memory->held;
      for (size_t i = 0; i < held.size();) {
        auto& points = held[i]->used_until;
        if (std::all_of(points.begin(), points.end(), is_reached)) {
          ready.push_back(held[i]);
          held.erase(held.begin() + i);
        } else {
          i++;
        }
      }
    }
    for (auto* block : ready) {
      give_back(block);
    }
  }
};
static DeviceAllocator the_allocator;
c10::Allocator* device_allocator() { return &the_allocator; }

// Pinned memory: a block is free once the copies from and to it have run, and is NaN before and after its use.
struct HostBlock {
  char* bytes;
  size_t size;
  std::vector<Point> used_until;
};
static std::map<char*, std::pair<size_t, HostBlock*>> pinned; // ranges; no block for memory that is only registered
static std::vector<HostBlock*> pinned_held;

static std::map<char*, std::pair<size_t, HostBlock*>>::iterator pinned_range(const void* pointer) {
  auto found = pinned.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  if (found == pinned.begin()) return pinned.end();
  --found;
  return static_cast<const char*>(pointer) < found->first + found->second.first ? found : pinned.end();
}
static bool is_pinned(const void* pointer) {
  std::unique_lock<std::mutex> hold(memory_lock);
  return pinned_range(pointer) != pinned.end();
}
static void use_pinned(const void* pointer, const Point& until) {
  std::unique_lock<std::mutex> hold(memory_lock);
  auto found = pinned_range(pointer);
  if (found != pinned.end() && found->second.second) found->second.second->used_until.push_back(until);
}
static void release_pinned(void* context) {
  auto* block = static_cast<HostBlock*>(context);
  std::unique_lock<std::mutex> hold(memory_lock);
  pinned.erase(block->bytes);
  pinned_held.push_back(block);
}
struct PinnedAllocator final : at::HostAllocator {
  DataPtr allocate(size_t size) override {
    std::unique_lock<std::mutex> hold(memory_lock);
    for (size_t i = 0; i < pinned_held.size();) {
      auto* block = pinned_held[i];
      if (!state().forked && !std::all_of(block->used_until.begin(), block->used_until.end(), is_reached)) {
        i++;
        continue;
      }
      memset(block->bytes, 0xFF, block->size);
      free(block->bytes);
      delete block;
      pinned_held.erase(pinned_held.begin() + i);
    }
    auto* block = new HostBlock{static_cast<char*>(aligned_alloc(64, (size + 64) / 64 * 64)), size, {}};
    memset(block->bytes, 0xFF, size);
    pinned[block->bytes] = {size + 1, block};
    return {block->bytes, block, &release_pinned, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  bool record_event(void* pointer, void*, c10::Stream stream) override {
    use_pinned(pointer, end_of({stream.device_index(), stream.id()}));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
static PinnedAllocator the_pinned_allocator;

// ---- Streams and events

struct Event {
  Point point;
  int asked = 0;
  std::shared_ptr<double> time = std::make_shared<double>(0); // in milliseconds, of the moment its stream gets there
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(CUDA, current_device()); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < state().devices, "CUDA error: invalid device ordinal (pretended device)");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device() = device.index();
  }
  static c10::Stream stream_of(QueueKey key) {
    return c10::Stream(c10::Stream::UNSAFE, Device(CUDA, key.first), key.second);
  }
  static QueueKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
  static int index_of(Device device) { return device.index() < 0 ? current_device() : device.index(); }
  c10::Stream getStream(Device device) const override { return stream_of(current_queue(device.index())); }
  c10::Stream getDefaultStream(Device device) const override { return stream_of({index_of(device), 0}); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    static std::atomic<int> next{0}; // as torch: a few streams, in turn
    return stream_of({index_of(device), 1 + next++ % 32});
  }
  c10::Stream getNewStream(Device device, int) const override {
    Hold hold(state().lock);
    return stream_of({index_of(device), state().next_stream++});
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    set_current_stream(key_of(stream));
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    auto& recorded = *static_cast<Event*>(*event);
    recorded = Event{};
    auto time = recorded.time;
    // A task of its own, so that it is not done before its stream runs even if the stream has nothing to do.
    enqueue(key_of(stream), [time] {
      *time = std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count();
    });
    recorded.point = end_of(key_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    auto point = static_cast<Event*>(event)->point;
    if (point.at && point.key != key_of(stream)) enqueue(key_of(stream), nullptr, point);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& asked = *static_cast<Event*>(event);
    // Not the first time, so that code has to be right when it is not done; later, as time passes for those who poll.
    if (!is_reached(asked.point) && ++asked.asked > 3) nudge(asked.point);
    return is_reached(asked.point);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    count();
    if (event) wait_for(static_cast<Event*>(event)->point);
  }
  bool queryStream(const c10::Stream& stream) const override { return is_reached(end_of(key_of(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_sync("stream.synchronize()");
    wait_for(end_of(key_of(stream)));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    count();
    wait_for_device(device < 0 ? current_device() : device);
  }
  void recordDataPtrOnStream(const DataPtr& pointer, const c10::Stream& stream) const override {
    the_allocator.recordStream(pointer, stream);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    auto &from = *static_cast<Event*>(start), &to = *static_cast<Event*>(end);
    TORCH_CHECK(from.point.key.first == to.point.key.first, "events of different devices");
    TORCH_CHECK(is_reached(from.point) && is_reached(to.point), "both events must be completed before calculating elapsed time");
    return *to.time - *from.time;
  }
  DeviceIndex deviceCount() const noexcept override { return state().devices; }

 private:
  static void count() {
    Hold hold(state().lock);
    state().syncs++;
  }
};

// ---- Random numbers

// A seed and a number of draws, as Philox has: a task gets its own CPU generator when it is queued, not when it runs.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex device)
      : GeneratorImpl(Device(CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t value) override { seed_ = value, offset_ = 0; }
  void set_offset(uint64_t value) override { offset_ = value; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& from) override {
    TORCH_CHECK(from.numel() == 16 && from.is_cpu(), "the state of a CUDA generator is 16 bytes on the CPU");
    auto* words = static_cast<const uint64_t*>(from.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    // Not by the dispatcher, as a mode may be active that makes tensors without memory.
    auto out = at::detail::empty_cpu({16}, at::kByte, false, std::nullopt);
    auto* words = static_cast<uint64_t*>(out.mutable_data_ptr());
    words[0] = seed_, words[1] = offset_;
    return out.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& from) override {
    seed_ = from->current_seed(), offset_ = from->get_offset();
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::intrusive_ptr<c10::GeneratorImpl>::reclaim(clone_impl());
  }
  static c10::DeviceType device_type() { return CUDA; }
  at::Generator next() {
    std::lock_guard<std::mutex> hold(mutex_);
    auto mixed = (seed_ + 0x9E3779B97F4A7C15ull * (offset_ + 1)) >> 16; // of which the CPU's takes 32 bits
    offset_ += 4;
    return at::detail::createCPUGenerator(mixed);
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

static const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < 16; index++) made->push_back(at::make_generator<Generator>(DeviceIndex(index)));
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

// ---- Hooks

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return state().devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return state().used; }
  DeviceIndex deviceCount() const override { return state().devices; }
  int getNumGPUs() const override { return state().devices; }
  DeviceIndex current_device() const override { return pretended::current_device(); }
  DeviceIndex getCurrentDevice() const override { return pretended::current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(CUDA, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = pretended::current_device();
    if (device >= 0) setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &the_pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &the_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(CUDA, pretended::current_device()); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(DeviceIndex(device < 0 ? pretended::current_device() : device));
  }
  void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};

// ---- Operations

at::Tensor cpu_alias(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto& of = tensor.storage();
  auto storage = c10::Storage(
      c10::Storage::use_byte_size_t(), of.nbytes(),
      DataPtr(const_cast<void*>(of.data()), Device(c10::DeviceType::CPU)), nullptr, false);
  auto out = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) out._set_conj(true);
  if (tensor.is_neg()) out._set_neg(true);
  return out;
}

using Map = std::function<at::Tensor(const at::Tensor&)>;

// A value of an operation's stack with another tensor for each of its tensors, and another device for CUDA.
static IValue mapped(const IValue& value, const Map& map, Device device) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (auto&& tensor : value.toTensorVector()) out.push_back(map(tensor));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      out.push_back(tensor ? std::optional<at::Tensor>(map(*tensor)) : tensor);
    return out;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return device;
  return value;
}

static void visit(const IValue& value, const std::function<void(const at::Tensor&)>& see) {
  mapped(value, [&](const at::Tensor& tensor) { if (tensor.defined()) see(tensor); return tensor; }, c10::kCPU);
}

static at::Tensor on_meta(const at::Tensor& tensor) {
  // A number of the host stays one: it does not decide the dtype of the result.
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
  auto out = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta).pinned_memory(false));
  out._set_conj(tensor.is_conj());
  out._set_neg(tensor.is_neg());
  return out;
}

static at::Tensor on_device(const at::Tensor& like) {
  if (!like.defined()) return like;
  auto options = like.options().device(Device(CUDA, current_device())).pinned_memory(false);
  return at::empty_strided(like.sizes(), like.strides(), options);
}

static bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// The arguments as the CPU's kernel gets them when it runs. What is on the host is read now, as a launch reads it.
static Stack on_host(const c10::FunctionSchema& schema, const Stack& arguments) {
  Stack out;
  for (size_t i = 0; i < arguments.size(); i++) {
    bool written = is_written(schema.arguments()[i]);
    out.push_back(mapped(arguments[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined() || tensor.is_cuda() || written) return cpu_alias(tensor);
      auto copy = tensor.clone();
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copy;
    }, c10::kCPU));
  }
  return out;
}

static const std::set<std::string> TAKES_TENSORS_OF_THE_HOST{
    "aten::index.Tensor", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index.Tensor",
    "aten::_unsafe_index_put", "aten::index.Tensor_out"};

static void check_devices(const c10::OperatorHandle& op, const Stack& arguments, int device) {
  auto name = c10::toString(op.operator_name());
  if (TAKES_TENSORS_OF_THE_HOST.count(name) || name.rfind("aten::", 0)) return;
  for (auto& argument : arguments)
    visit(argument, [&](const at::Tensor& tensor) {
      bool fits = tensor.is_cuda() ? tensor.get_device() == device : tensor.dim() == 0 || !tensor.is_cpu();
      TORCH_CHECK(fits, "Expected all tensors to be on the same device, but found at least two devices, cuda:", device,
                  " and ", tensor.device(), "! (when checking arguments of ", name, ")");
    });
}

// Give the operation what it draws from: its own CPU generator.
static void replace_generator(const c10::OperatorHandle& op, const Stack& arguments, Stack& cpu, Stack* metas, int device) {
  const auto& schema = op.schema();
  for (size_t i = 0; i < arguments.size(); i++) {
    auto type = schema.arguments()[i].type();
    bool generates = type->kind() == c10::TypeKind::GeneratorType;
    if (auto optional = type->cast<c10::OptionalType>())
      generates = optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
    if (!generates) continue;
    auto given = arguments[i].isGenerator() ? arguments[i].toGenerator() : default_generator(device);
    TORCH_CHECK(given.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", given.device().type(), "'");
    if (metas) (*metas)[i] = IValue();
    else cpu[i] = static_cast<Generator*>(given.unsafeGetGeneratorImpl())->next();
    return;
  }
  TORCH_CHECK(!op.hasTag(at::Tag::nondeterministic_seeded) || metas, "the pretended device cannot draw for ", op.operator_name());
}

static void resize_storage(c10::StorageImpl* storage, size_t size) {
  if (size == storage->nbytes()) return;
  OnDevice on(storage->device().index());
  auto fresh = the_allocator.allocate(size);
  auto *to = fresh.get();
  const auto* from = storage->data();
  auto kept = std::min(size, storage->nbytes());
  if (kept) enqueue(current_queue(), [to, from, kept] { memcpy(to, from, kept); });
  storage->set_data_ptr_noswap(std::move(fresh)); // frees the former, whose memory becomes NaN after the copy
  storage->set_nbytes(size);
}

static const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  auto need = (self.storage_offset() + self.numel()) * self.dtype().itemsize();
  if (self.numel() && need > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), need);
  return self;
}

static at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  out._set_conj(like.is_conj());
  out._set_neg(like.is_neg());
  return out;
}

static void call_now(const c10::OperatorHandle& op, Stack& cpu) {
  note_sync(c10::toString(op.operator_name()).c_str());
  wait_for(end_of(current_queue()));
  op.callBoxed(&cpu);
}

// Size an `out=` of no elements as the operation will have it.
static void grow_outputs(const c10::OperatorHandle& op, const Stack& arguments) {
  const auto& schema = op.schema();
  auto is_out = [&](size_t i) { return is_written(schema.arguments()[i]) && schema.arguments()[i].kwarg_only() && arguments[i].isTensor(); };
  bool grows = false;
  for (size_t i = 0; i < arguments.size(); i++)
    grows |= is_out(i) && arguments[i].toTensor().defined() && arguments[i].toTensor().numel() == 0;
  if (!grows) return;
  Stack shapes, none;
  for (auto& argument : arguments) shapes.push_back(mapped(argument, on_meta, c10::kMeta));
  replace_generator(op, arguments, none, &shapes, 0);
  try {
    auto called = shapes;
    op.callBoxed(&called);
  } catch (const std::exception&) { // its shape depends on values
    shapes.clear();
    for (auto& argument : arguments)
      shapes.push_back(mapped(argument, [](const at::Tensor& tensor) {
        bool empty = tensor.defined() && tensor.is_cuda() && tensor.numel() == 0;
        return empty ? at::empty_like(tensor, tensor.options().device(c10::kCPU)) : cpu_alias(tensor);
      }, c10::kCPU));
    auto called = shapes;
    call_now(op, called);
  }
  for (size_t i = 0; i < arguments.size(); i++)
    if (is_out(i) && shapes[i].toTensor().defined()) arguments[i].toTensor().resize_(shapes[i].toTensor().sizes());
}

static std::string name_of(const c10::OperatorHandle& op) { return c10::toString(op.operator_name()); }
static bool says_why() {
  static const bool says = getenv("TRAINKIT_PRETENDED_WHY") != nullptr;
  return says;
}

// Every operation without a kernel of its own: its shape by the meta kernel now, its values by the CPU's kernel later.
static void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  auto count = schema.arguments().size();
  Stack arguments(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());
  int device = -1;
  for (auto& argument : arguments)
    visit(argument, [&](const at::Tensor& tensor) { if (tensor.is_cuda() && device < 0) device = tensor.get_device(); });
  for (auto& argument : arguments)
    if (device < 0 && argument.isDevice()) device = argument.toDevice().index();
  if (device < 0) device = current_device();
  OnDevice on(device);
  BelowAutograd below;
  check_devices(op, arguments, device);

  bool is_view = false;
  for (auto& result : schema.returns()) is_view |= result.alias_info() && !result.alias_info()->isWrite();
  if (is_view) {
    at::Tensor base;
    for (auto& argument : arguments)
      visit(argument, [&](const at::Tensor& tensor) { if (tensor.is_cuda() && !base.defined()) base = tensor; });
    auto cpu = on_host(schema, arguments);
    op.callBoxed(&cpu);
    for (auto& value : cpu)
      stack->push_back(mapped(value, [&](const at::Tensor& like) { return view_of(base, like); }, c10::kCPU));
    return;
  }

  grow_outputs(op, arguments);
  auto cpu = on_host(schema, arguments);
  replace_generator(op, arguments, cpu, nullptr, device);
  std::vector<std::optional<IValue>> results; // an argument that is written and returned, or what is to be made
  bool makes = false;
  for (auto& result : schema.returns()) {
    std::optional<IValue> same;
    for (size_t i = 0; i < count && result.alias_info(); i++)
      if (is_written(schema.arguments()[i]) && *schema.arguments()[i].alias_info() == *result.alias_info()) same = arguments[i];
    makes |= !same;
    results.push_back(same);
  }
  // Also for an operation in place, as a wrong shape is an error of the call and not of the task.
  Stack shapes;
  bool known = true;
  for (auto& argument : arguments) shapes.push_back(mapped(argument, on_meta, c10::kMeta));
  replace_generator(op, arguments, cpu, &shapes, device);
  try {
    op.callBoxed(&shapes);
  } catch (const c10::NotImplementedError&) {
    known = !makes; // there is no meta kernel
    for (size_t i = 0; known && i < results.size(); i++) known = results[i].has_value();
    if (known) shapes.assign(results.size(), IValue(at::Tensor()));
  } catch (const std::exception&) {
    known = false;
  }
  if (!known && says_why()) fprintf(stderr, "%s waits for the device\n", name_of(op).c_str());
  for (size_t i = 0; known && i < results.size(); i++)
    known = results[i] || shapes[i].isTensor() || shapes[i].isTensorList();
  if (!known) { // depends on values, or is wrong
    call_now(op, cpu);
    for (size_t i = 0; i < results.size(); i++)
      stack->push_back(results[i] ? *results[i] : mapped(cpu[i], [](const at::Tensor& found) {
        auto out = on_device(found);
        if (found.defined()) cpu_alias(out).copy_(found);
        return out;
      }, c10::kCPU));
    return;
  }
  std::vector<IValue> targets;
  for (size_t i = 0; i < results.size(); i++) {
    if (!results[i]) results[i] = mapped(shapes[i], on_device, c10::kCPU);
    targets.push_back(mapped(*results[i], cpu_alias, c10::kCPU));
  }
  enqueue(current_queue(), [op, cpu, targets, makes]() mutable {
    BelowAutograd below;
    try {
      op.callBoxed(&cpu);
    } catch (...) {
      if (says_why()) fprintf(stderr, "%s failed in a queue\n", name_of(op).c_str());
      throw;
    }
    // The CPU makes no statistics of a batch norm in evaluation: those stay NaN.
    for (size_t i = 0; i < targets.size(); i++)
      TORCH_CHECK(!targets[i].isTensor() || !targets[i].toTensor().defined() || cpu[i].toTensor().numel() == 0 ||
                      targets[i].toTensor().sizes() == cpu[i].toTensor().sizes(),
                  name_of(op), " has shape ", cpu[i].toTensor().sizes(), " and not ", targets[i].toTensor().sizes());
    if (!makes) return;
    for (size_t i = 0; i < targets.size(); i++) {
      std::vector<at::Tensor> to, from;
      visit(targets[i], [&](const at::Tensor& tensor) { to.push_back(tensor); });
      visit(cpu[i], [&](const at::Tensor& tensor) { from.push_back(tensor); });
      TORCH_INTERNAL_ASSERT(to.size() == from.size());
      for (size_t j = 0; j < to.size(); j++)
        if (from[j].numel() > 0 && to[j].const_data_ptr() != from[j].const_data_ptr()) to[j].copy_(from[j]);
    }
  });
  for (auto& result : results) stack->push_back(*result);
}

static at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  OnDevice on(device ? device->index() : -1);
  TORCH_CHECK(current_device() < state().devices, "CUDA error: invalid device ordinal (pretended device)");
  return at::detail::empty_generic(
      size, &the_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

static at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  OnDevice on(device ? device->index() : -1);
  TORCH_CHECK(current_device() < state().devices, "CUDA error: invalid device ordinal (pretended device)");
  return at::detail::empty_strided_generic(
      size, stride, &the_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

static at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  BelowAutograd below;
  if (self.is_same(source)) return self;
  TORCH_CHECK(at::is_expandable_to(source.sizes(), self.sizes()), "output with shape ", self.sizes(), " doesn't match the broadcast shape ", source.sizes());
  auto to = cpu_alias(self), from = cpu_alias(source);
  auto run = [to, from] { BelowAutograd below; to.copy_(from); };
  if (self.is_cuda() && source.is_cuda() && self.get_device() != source.get_device()) {
    // As torch: on the source's stream, after and before what is on the target's.
    auto at_source = current_queue(source.get_device()), at_target = current_queue(self.get_device());
    enqueue(at_source, run, end_of(at_target));
    enqueue(at_target, nullptr, end_of(at_source));
    return self;
  }
  auto& device_side = self.is_cuda() ? self : source;
  auto& host_side = self.is_cuda() ? source : self;
  auto key = current_queue(device_side.get_device());
  if (self.is_cuda() == source.is_cuda()) {
    enqueue(key, run);
    return self;
  }
  const void* host = host_side.numel() ? host_side.const_data_ptr() : nullptr;
  bool is_pinned_copy = host && is_pinned(host);
  if (self.is_cuda() && !is_pinned_copy) { // staged: the caller may change it at once
    from = source.clone();
    enqueue(key, [to, from] { BelowAutograd below; to.copy_(from); });
  } else {
    enqueue(key, run);
  }
  auto end = end_of(key);
  if (is_pinned_copy) use_pinned(host, end);
  if (!non_blocking) note_sync("a copy between host and device");
  if (!non_blocking || (!self.is_cuda() && !is_pinned_copy)) wait_for(end);
  return self;
}

static at::Scalar item(const at::Tensor& self) {
  note_sync("item");
  wait_for(end_of(current_queue(self.get_device())));
  BelowAutograd below;
  return cpu_alias(self).item();
}

static void record_stream(at::Tensor& self, c10::Stream stream) {
  the_allocator.recordStream(self.storage().data_ptr(), stream);
}

static at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_storage_offset(offset.expect_int());
  if (stride.empty() && !size.empty()) impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  else impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}
static at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  auto elements = c10::SymInt(int64_t(source.nbytes() / self.dtype().itemsize()));
  return set_storage(self, source, 0, {elements}, {});
}
static at::Tensor& set_nothing(at::Tensor& self) {
  return set_whole_storage(self, at::empty({0}, self.options()).storage());
}

// The CPU's kernel draws from the CPU's default generator.
static std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& self, double p, std::optional<bool> train) {
  if (train && !*train) return {self.clone(), at::ones_like(self, self.options().dtype(at::kBool))};
  auto mask = at::empty_like(self).bernoulli_(1 - p);
  return {p == 1 ? self.mul(0) : self.mul(mask).mul_(1 / (1 - p)), mask.to(at::kBool)};
}

// The CPU has no fused cells.
static std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& cell, const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias) {
  auto gates = input + hidden;
  if (input_bias && input_bias->defined()) gates = gates + *input_bias;
  if (hidden_bias && hidden_bias->defined()) gates = gates + *hidden_bias;
  auto parts = gates.chunk(4, 1);
  auto next = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, gates.detach()};
}
static std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& state, const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias) {
  auto i = (input_bias && input_bias->defined() ? input + *input_bias : input).chunk(3, 1);
  auto h = (hidden_bias && hidden_bias->defined() ? hidden + *hidden_bias : hidden).chunk(3, 1);
  auto reset = (i[0] + h[0]).sigmoid(), update = (i[1] + h[1]).sigmoid(), fresh = (i[2] + reset * h[2]).tanh();
  return {(state - fresh) * update + fresh, update.detach()};
}

static int64_t attention_in_steps(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0; // SDPBackend::math
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("native_dropout", TORCH_FN(dropout));
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  // Composites that choose a kernel by the device, such as cuDNN's.
  for (auto* name : {"convolution", "convolution_backward", "_convolution", "_fused_sdp_choice"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) {
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
}

// A structured operation would make its output and call its `out=`, at twice the cost and with warnings of resizing.
static void take_structured_operations() {
  static torch::Library* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || name.name.rfind("aten::", 0) != 0) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional)) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    auto own = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(own.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// ---- Python

static void bind_device(py::module& m) {
  c10::SetAllocator(CUDA, &the_allocator);
  at::setHostAllocator(CUDA, &the_pinned_allocator);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_in_steps);
  take_structured_operations();
  on_fork([] {
    new (&memory_lock) std::mutex;
    if (state().forked) the_memory = new Memory;
  });
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def("set_devices", [](int count) { state().devices = count; });
  m.def("device_count", [] { return state().forked ? 0 : state().devices; });
  m.def("set_policy", [](int policy, uint64_t seed) { set_policy(Policy(policy), seed); }, NoGil());
  m.def("is_forked", [] { return state().forked; });
  m.def("set_sync_mode", [](int mode) { state().sync_mode = mode; });
  m.def("sync_mode", [] { return state().sync_mode; });
  m.def("syncs", [] { Hold hold(state().lock); return state().syncs; });
  m.def("tasks_run", [] { Hold hold(state().lock); return state().tasks_run; });
  m.def("queue_nothing", [] { enqueue(current_queue(), [] {}); });
  m.def("current_device", [] { return current_device(); });
  m.def("set_device", [](int device) { Guard().setDevice(Device(CUDA, device)); });
  m.def("current_stream", [](int device) { return current_queue(device).second; });
  m.def("set_stream", [](int device, int64_t stream) { set_current_stream({device, stream}); });
  m.def("new_stream", [] { Hold hold(state().lock); return state().next_stream++; });
  m.def("synchronize", [](int device) { Guard().synchronizeDevice(device); }, NoGil());
  m.def("empty_cache", [] { the_allocator.emptyCache(); }, NoGil());
  m.def("memory", [](int device) {
    auto stats = the_allocator.getDeviceStats(device);
    py::dict out;
    auto add = [&](const char* name, const c10::CachingAllocator::StatArray& all) {
      auto& stat = all[size_t(Stat::AGGREGATE)];
      out[name] = py::dict(py::arg("current") = stat.current, py::arg("peak") = stat.peak,
                           py::arg("allocated") = stat.allocated, py::arg("freed") = stat.freed);
    };
    add("allocated_bytes", stats.allocated_bytes);
    add("reserved_bytes", stats.reserved_bytes);
    add("allocation", stats.allocation);
    add("segment", stats.segment);
    return out;
  });
  m.def("memory_info", [](int device) { return the_allocator.getMemoryInfo(device); });
  m.def("set_memory_limit", [](size_t bytes) { the_memory->limit = bytes; });
  m.def("reset_peak", [](int device) { the_allocator.resetPeakStats(device); });
  m.def("elapsed_time", [](size_t start, size_t end) { return Guard().elapsedTime((void*)start, (void*)end, 0); });
  m.def("default_generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(device)));
  });
  m.def("pin", [](size_t at, size_t size) {
    std::unique_lock<std::mutex> hold(memory_lock);
    pinned[reinterpret_cast<char*>(at)] = {size, nullptr};
  });
  m.def("unpin", [](size_t at) {
    std::unique_lock<std::mutex> hold(memory_lock);
    pinned.erase(reinterpret_cast<char*>(at));
  });
  m.def("resize_storage", [](const at::Tensor& whole, size_t size) {
    resize_storage(whole.storage().unsafeGetStorageImpl(), size);
  });
}

} // namespace pretended

namespace c10::impl {
using PretendedGuard = pretended::Guard;
C10_REGISTER_GUARD_IMPL(CUDA, PretendedGuard)
} // namespace c10::impl

namespace at {
using PretendedHooks = pretended::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendedHooks)
} // namespace at

void bind_communicator(py::module& m);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pretended::bind_device(m);
  bind_communicator(m);
}
