// A CUDA device for a CPU build of torch: its memory is host memory, and the CPU's kernels compute on it.
//
// `run_on_host` receives each operator that reaches the CUDA backend, and runs the operator on the CPU with tensors over
// the same memory. Everything above a backend (autograd and its thread per device, autocast, the dispatcher) is torch's
// own code. Forbidden operations of the host are detected. It must not mix devices. It must not access the page-locked
// target of a copy before it has waited for the copy: the target is filled with marker values, and its pages are
// protected until then. It must not change the page-locked source of a copy: the bytes are compared with a snapshot.
// During a capture, `run_on_host` also adds the operators to a graph, and memory that they wrote is restored afterwards.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Storage;
using c10::Stream;
using at::Tensor;
using torch::jit::Stack;

constexpr int MOST_GPUS = 8;
thread_local DeviceIndex current_device = 0;

// --- messages to Python --------------------------------------------------------------------------------------------

// kind: 'w' for a wait of the host, 'c' for an asynchronous copy. Returns the index of the place in the Python code.
int (*tell)(char kind, const char* what) = nullptr;
int told(char kind, const std::string& what) { return tell ? tell(kind, what.c_str()) : 0; }

// --- memory of the devices -----------------------------------------------------------------------------------------

std::mutex memory_lock;
std::atomic<int64_t> used[MOST_GPUS], peak[MOST_GPUS], limits[MOST_GPUS];

// Memory allocated in captures. The pool keeps its peak memory, also after tensors are freed, while one of its graphs lives.
struct Pool {
  std::set<struct Graph*> graphs;
  int64_t live = 0, kept = 0;
};
std::shared_ptr<Pool> pool_of_capture(DeviceIndex device);

void account(DeviceIndex device, Pool* pool, int64_t change) {
  std::lock_guard<std::mutex> lock(memory_lock);
  int64_t more = change;
  if (pool) more = std::max(pool->live + change, pool->graphs.empty() ? 0 : pool->kept) - pool->kept;
  TORCH_CHECK_WITH(
      OutOfMemoryError, more <= 0 || used[device] + more <= limits[device], "CUDA out of memory. Tried to allocate ",
      change, " bytes on the simulated GPU ", int(device), ", which has ", limits[device] - used[device], " left");
  if (pool) pool->live += change, pool->kept += more;
  used[device] += more;
  peak[device] = std::max(peak[device].load(), used[device].load());
}

// Data of a device storage: the host storage that it represents.
struct Block {
  Storage host;
  DeviceIndex device;
  std::shared_ptr<Pool> pool;  // null outside captures
  int64_t bytes = 0;

  Block(Storage storage, DeviceIndex index)
      : host(std::move(storage)), device(index), pool(pool_of_capture(index)) { follow(); }
  ~Block() { account(device, pool.get(), -bytes); }

  void follow() {
    int64_t now = host.nbytes();
    account(device, pool.get(), now - bytes);
    bytes = now;
  }
};

void free_block(void* block) { delete static_cast<Block*>(block); }

c10::DataPtr pointer_to(Block* block) {
  return {block->host.mutable_data(), block, &free_block, Device(c10::kCUDA, block->device)};
}

Storage host_storage(size_t bytes) {
  return Storage(Storage::use_byte_size_t(), bytes, c10::GetAllocator(c10::kCPU), /*resizable=*/true);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return pointer_to(new Block(host_storage(bytes), current_device)); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
} device_allocator;

Block* block_of(const Storage& storage) {
  TORCH_INTERNAL_ASSERT(storage.data_ptr().get_deleter() == &free_block, "memory that no simulated GPU has given");
  return static_cast<Block*>(storage.data_ptr().get_context());
}

Storage device_storage(const Storage& host, DeviceIndex device) {
  return Storage(
      Storage::use_byte_size_t(), host.nbytes(), pointer_to(new Block(host, device)), &device_allocator, true);
}

// Updates a device storage after the size of its host storage has changed.
void follow_size(c10::StorageImpl* storage, Block* block) {
  block->follow();
  storage->_mutable_data_ptr_no_checks().release_context();
  storage->set_data_ptr_noswap(pointer_to(block));
  storage->set_nbytes(block->bytes);
}

void* bytes_of(const Storage& storage) { return storage.mutable_data(); }

Tensor tensor_over(Storage storage, DispatchKey key, const Tensor& shaped) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), shaped.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(shaped.sizes(), shaped.strides(), shaped.storage_offset());
  return made;
}

// --- page-locked memory --------------------------------------------------------------------------------------------

struct Pages {
  size_t bytes;
  bool closed = false;
  int copy = 0;  // index of the last copy into these pages
};
std::map<char*, Pages> pages;
std::atomic_flag pages_in_use = ATOMIC_FLAG_INIT;  // not a mutex, because a signal handler takes the lock
std::vector<int> touched(1 << 16);                 // copies whose target was accessed too early
std::atomic<int> num_touched{0};

struct PagesLock {
  PagesLock() { while (pages_in_use.test_and_set()) {} }
  ~PagesLock() { pages_in_use.clear(); }
};

std::pair<char* const, Pages>* pages_at(const void* address) {
  auto found = pages.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
  if (found == pages.begin()) return nullptr;
  --found;
  return address < found->first + found->second.bytes ? &*found : nullptr;
}

void close_pages(const void* address, bool closed, int copy = 0) {
  PagesLock lock;
  if (auto* found = pages_at(address)) {
    found->second.closed = closed;
    if (closed) found->second.copy = copy;
    mprotect(found->first, found->second.bytes, closed ? PROT_NONE : PROT_READ | PROT_WRITE);
  }
}

void free_pages(void* base) {
  PagesLock lock;
  munmap(base, pages.at(static_cast<char*>(base)).bytes);
  pages.erase(static_cast<char*>(base));
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    size_t page = sysconf(_SC_PAGESIZE), whole = (bytes / page + 1) * page;
    void* base = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(base != MAP_FAILED, "no room for page-locked memory");
    PagesLock lock;
    pages[static_cast<char*>(base)] = {whole};
    return {base, base, &free_pages, Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
} pinned_allocator;

struct sigaction handler_before;

void on_fault(int number, siginfo_t* info, void* context) {
  {
    PagesLock lock;
    if (auto* found = pages_at(info->si_addr)) {
      if (found->second.closed) {
        touched[num_touched++ % touched.size()] = found->second.copy;
        found->second.closed = false;
        mprotect(found->first, found->second.bytes, PROT_READ | PROT_WRITE);
      }
      return;  // the access continues, and reads the marker values
    }
  }
  if (handler_before.sa_flags & SA_SIGINFO) return handler_before.sa_sigaction(number, info, context);
  if (handler_before.sa_handler != SIG_DFL && handler_before.sa_handler != SIG_IGN)
    return handler_before.sa_handler(number);
  signal(number, SIG_DFL);
}

bool is_pinned(const void* address) {
  PagesLock lock;
  return pages_at(address) != nullptr;
}

// --- pending copies ------------------------------------------------------------------------------------------------

struct Copy {
  DeviceIndex device;
  int64_t ticket;
  Tensor target, values;
};
// Pending copy to a device. Keeps its source alive, as torch keeps page-locked memory that is freed too early.
struct Upload {
  DeviceIndex device;
  int64_t ticket;
  Tensor source, values;
  int place;
};
std::mutex copies_lock;
std::vector<Copy> copies;
std::vector<Upload> uploads;
std::vector<int> changed;  // places of copies whose source was changed too early
std::atomic<int64_t> last_ticket{0}, done[MOST_GPUS];

template <typename Each>
std::vector<Each> take_done(std::vector<Each>& all, DeviceIndex device, int64_t ticket) {
  std::lock_guard<std::mutex> lock(copies_lock);
  auto rest = std::stable_partition(
      all.begin(), all.end(), [&](const Each& each) { return each.device != device || each.ticket > ticket; });
  std::vector<Each> taken(rest, all.end());
  all.erase(rest, all.end());
  return taken;
}

void finish_uploads(DeviceIndex device, int64_t ticket) {
  for (auto& upload : take_done(uploads, device, ticket)) {
    auto now = upload.source.contiguous();
    if (memcmp(now.const_data_ptr(), upload.values.const_data_ptr(), now.nbytes()) == 0) continue;
    std::lock_guard<std::mutex> lock(copies_lock);
    changed.push_back(upload.place);
  }
}

// Completes all operations of a device up to a ticket.
void wait_for(DeviceIndex device, int64_t ticket) {
  if (ticket > done[device]) done[device] = ticket;
  at::AutoDispatchBelowADInplaceOrView below;
  finish_uploads(device, ticket);
  for (auto& copy : take_done(copies, device, ticket)) {
    close_pages(copy.target.storage().data(), false);
    copy.target.copy_(copy.values);
  }
}

void wait_for_all(DeviceIndex device) { wait_for(device, last_ticket); }

void spoil(const Tensor& target) {
  if (at::isFloatingType(target.scalar_type())) target.fill_(std::numeric_limits<double>::quiet_NaN());
  else if (target.scalar_type() == at::kBool) target.fill_(true);
  else target.fill_(at::isIntegralType(target.scalar_type(), false) ? 77 : 0);
}

void copy_later(const Tensor& target, const Tensor& values, DeviceIndex device) {
  int place = told('c', "aten::copy_");
  close_pages(target.storage().data(), false);  // another copy may already target this memory
  spoil(target);
  std::lock_guard<std::mutex> lock(copies_lock);
  copies.push_back({device, ++last_ticket, target.alias(), values.clone()});
  close_pages(target.storage().data(), true, place);
}

void upload(const Tensor& target, const Tensor& source, DeviceIndex device) {
  int place = told('c', "aten::copy_");
  auto values = source.clone(at::MemoryFormat::Contiguous);
  target.copy_(values);
  std::lock_guard<std::mutex> lock(copies_lock);
  uploads.push_back({device, ++last_ticket, source.alias(), values, place});  // keeps the memory, but no Python object
}

// --- streams and captures ------------------------------------------------------------------------------------------

thread_local c10::StreamId current_streams[MOST_GPUS] = {};  // 0: default stream
std::atomic<c10::StreamId> last_stream{0};

Stream current_stream(DeviceIndex device) {
  if (device < 0) device = current_device;
  return Stream(Stream::UNSAFE, Device(c10::kCUDA, device), current_streams[device]);
}

struct Graph* capturing = nullptr;  // there is at most one capture at a time
std::recursive_mutex graphs_lock;    // Python may collect a graph at any time

Graph* capture_of(const Stream& stream);
Graph* capture_on(Device device) {
  return capturing && device.is_cuda() ? capture_of(current_stream(device.index())) : nullptr;
}

[[noreturn]] void invalidate_capture(const std::string& why = "operation not permitted when stream is capturing");

// --- generators ----------------------------------------------------------------------------------------------------

// State of a generator. A graph keeps the state object that its generator had at the capture, and draws from it.
struct GeneratorState final : c10::intrusive_ptr_target {
  at::Generator host;
  bool capturing = false;
  explicit GeneratorState(at::Generator host) : host(std::move(host)) {}
};

struct DeviceGenerator final : c10::GeneratorImpl {
  c10::intrusive_ptr<GeneratorState> state;

  DeviceGenerator(Device device, c10::intrusive_ptr<GeneratorState> state)
      : GeneratorImpl(device, DispatchKeySet(DispatchKey::CUDA)), state(std::move(state)) {}

  at::Generator& host(const char* what) const {
    TORCH_CHECK(!capture_on(device_), "Cannot call CUDAGeneratorImpl::", what, " during CUDA graph capture.");
    return state->host;
  }
  void set_current_seed(uint64_t seed) override { host("set_current_seed").set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host("set_offset").set_offset(offset); }
  uint64_t get_offset() const override { return host("get_offset").get_offset(); }
  uint64_t current_seed() const override { return state->host.current_seed(); }
  uint64_t seed() override { return host("seed").seed(); }
  void set_state(const c10::TensorImpl& place) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    state = c10::dynamic_intrusive_pointer_cast<DeviceGenerator>(other)->state;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<DeviceGenerator>(device_, state);
  }
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(device_, c10::make_intrusive<GeneratorState>(host("clone_impl").clone()));
  }
};

at::Generator default_generators[MOST_GPUS];

c10::intrusive_ptr<GeneratorState> state_to_draw_from(Device device, const at::Generator& generator) {
  auto state = static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->state;
  bool captured = capture_on(device) != nullptr;
  TORCH_CHECK(!captured || state->capturing, "Attempt to increase offset for a CUDA generator not in capture mode.");
  TORCH_CHECK(captured || !state->capturing, "Offset increment outside graph capture encountered unexpectedly.");
  return state;
}

// Scope in which draws from the host's default generator come from a device's generator.
struct Drawing {
  static inline std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock{one_at_a_time};
  at::CPUGeneratorImpl& device;

  explicit Drawing(GeneratorState& state) : device(*state.host.get<at::CPUGeneratorImpl>()) { exchange(); }
  ~Drawing() { exchange(); }

  void exchange() {
    auto& host = *at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
    std::lock_guard<std::mutex> lock(host.mutex_);
    auto engine = host.engine();
    auto as_float = host.next_float_normal_sample();
    auto as_double = host.next_double_normal_sample();
    host.set_engine(device.engine());
    host.set_next_float_normal_sample(device.next_float_normal_sample());
    host.set_next_double_normal_sample(device.next_double_normal_sample());
    device.set_engine(engine);
    device.set_next_float_normal_sample(as_float);
    device.set_next_double_normal_sample(as_double);
  }
};

// --- graphs --------------------------------------------------------------------------------------------------------

// Operators of captured streams, which a replay runs again on the same memory.
struct Graph {
  const DeviceIndex device = ::current_device;
  const std::thread::id thread = std::this_thread::get_id();
  const char mode;  // waits that invalidate a capture: 'g' of any thread, 't' of its thread, 'r' only on its streams
  const int64_t number;
  std::set<c10::StreamId> streams{current_streams[device]};
  std::shared_ptr<Pool> pool;
  c10::intrusive_ptr<GeneratorState> generator;
  bool invalid = false;
  std::vector<std::function<void()>> calls;
  std::map<const c10::StorageImpl*, std::pair<Storage, caffe2::TypeMeta>> own;  // storages of the pool, with dtypes
  std::map<const c10::StorageImpl*, std::pair<Storage, std::string>> before;    // old contents of other storages
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> needed;                // other storages of a replay
  Tensor drawn_before;
  std::map<std::string, std::shared_ptr<Tensor>> places;  // generator offsets: in the capture, and in the last replay

  Graph(char mode, std::shared_ptr<Pool> of) : mode(mode), number(++last_number), pool(std::move(of)) {
    TORCH_CHECK(
        current_streams[device] != 0,
        "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on the "
        "default stream.)");
    TORCH_CHECK(!capturing, "CUDA error: operation not permitted when stream is capturing");
    generator = static_cast<DeviceGenerator*>(default_generators[device].unsafeGetGeneratorImpl())->state;
    generator->capturing = true;
    drawn_before = generator->host.get_state();
    std::lock_guard<std::mutex> lock(memory_lock);
    pool->graphs.insert(this);
    capturing = this;
  }

  ~Graph() {
    if (capturing == this) undo();
    {
      std::lock_guard<std::mutex> lock(memory_lock);
      pool->graphs.erase(this);
    }
    account(device, pool.get(), 0);  // frees memory that no tensor uses
  }

  // Undoes all writes of the capture, because on a real device a capture runs nothing.
  void undo() {
    capturing = nullptr;
    for (auto& [_, found] : before)
      memcpy(bytes_of(found.first), found.second.data(), std::min(found.first.nbytes(), found.second.size()));
    before.clear();
    generator->host.set_state(drawn_before);
    spoil_memory();
  }

  void end() {
    TORCH_CHECK(capturing == this, "capture_end() called before capture_begin().");
    TORCH_CHECK(streams.count(current_streams[device]), "Capture must end on the same stream it began on.");
    undo();
    check();
    generator->capturing = false;
  }

  void check() const { TORCH_CHECK(!invalid, "CUDA error: operation failed due to a previous error during capture"); }

  // Saves the contents of storages before a capture touches them.
  void remember(const std::vector<std::pair<Storage, Storage>>& storages) {
    for (auto& [_, host] : storages) {
      auto* key = host.unsafeGetStorageImpl();
      if (!own.count(key) && !before.count(key))
        before[key] = {host, std::string(static_cast<const char*>(host.data()), host.nbytes())};
    }
  }

  void add(std::function<void()> call, const std::vector<std::pair<Storage, Storage>>& storages) {
    calls.push_back(std::move(call));
    for (auto& [on_device, host] : storages)
      if (!own.count(host.unsafeGetStorageImpl())) needed.emplace_back(on_device.getWeakStorageImpl());
  }

  // Recomputed blocks get the offset of the generator, and restore this offset later.
  void note_place(const Tensor& place) {
    auto& noted = places[std::string(static_cast<const char*>(place.data_ptr()), place.nbytes())];
    if (!noted) noted = std::make_shared<Tensor>();
    calls.push_back([this, noted = noted] { *noted = generator->host.get_state(); });
  }

  void go_to_place(const c10::TensorImpl& place) {
    auto found = places.find(std::string(static_cast<const char*>(place.data()), place.numel()));
    TORCH_CHECK(
        found != places.end(),
        "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if new seed is the same as the "
        "original seed.");
    calls.push_back([this, noted = found->second] { generator->host.set_state(*noted); });
  }

  void spoil_memory() {
    for (auto& [_, found] : own) {
      auto& [storage, type] = found;
      auto whole = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), DispatchKeySet(DispatchKey::CPU), type);
      whole.unsafeGetTensorImpl()->set_sizes_contiguous({int64_t(storage.nbytes() / type.itemsize())});
      spoil(whole);
    }
  }

  void replay() {
    check();
    TORCH_CHECK(capturing != this, "Called CUDAGraph::replay without a preceding successful capture.");
    if (capture_on(Device(c10::kCUDA, device))) invalidate_capture();
    TORCH_CHECK(!generator->capturing, "Offset increment outside graph capture encountered unexpectedly.");
    for (auto& storage : needed)
      TORCH_CHECK(!storage.expired(), "a graph is replayed that uses memory which has been freed since its capture");
    at::AutoDispatchBelowADInplaceOrView below;
    for (auto* graph : pool->graphs) graph->spoil_memory();
    for (auto& call : calls) call();
  }

  static inline int64_t last_number = 0;
};

void DeviceGenerator::set_state(const c10::TensorImpl& place) {
  if (auto* graph = capture_on(device_)) graph->go_to_place(place);  // since torch 2.10; it raised before
  state->host.unsafeGetGeneratorImpl()->set_state(place);
}

c10::intrusive_ptr<c10::TensorImpl> DeviceGenerator::get_state() const {
  auto place = state->host.get_state();
  if (auto* graph = capture_on(device_)) graph->note_place(place);
  return place.getIntrusivePtr();
}

Graph* capture_of(const Stream& stream) {
  return capturing && capturing->device == stream.device_index() && capturing->streams.count(stream.id()) ? capturing
                                                                                                          : nullptr;
}

std::shared_ptr<Pool> pool_of_capture(DeviceIndex device) {
  auto* graph = capture_on(Device(c10::kCUDA, device));
  return graph ? graph->pool : nullptr;
}

void invalidate_capture(const std::string& why) {
  capturing->invalid = true;
  TORCH_CHECK(false, "CUDA error: ", why);
}

void check_may_wait(DeviceIndex device) {
  if (capturing &&
      (capture_on(Device(c10::kCUDA, device)) || capturing->mode == 'g' ||
       (capturing->mode == 't' && capturing->thread == std::this_thread::get_id())))
    invalidate_capture();
}

// Lets a stream wait for an event. number: capture in which the event was recorded, or 0.
void wait_for_event(int64_t number, const Stream& stream) {
  if (capturing && number == capturing->number) {
    if (stream.id() == 0) invalidate_capture("operation would make the legacy stream depend on a capturing blocking stream");
    capturing->streams.insert(stream.id());
  } else if (capture_of(stream)) invalidate_capture("dependency created on uncaptured work in another stream");
}

void host_waits(DeviceIndex device, const std::string& what) {
  check_may_wait(device);
  TORCH_CHECK(!told('w', what), "called a synchronizing CUDA operation");
  wait_for_all(device);
}

// Returns the value with each tensor replaced by the result of a function.
template <typename Function>
IValue with_tensors(const IValue& value, const Function& other) {
  if (value.isTensor()) return other(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorList()) list.push_back(other(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& each : value.toOptionalTensorList())
      list.push_back(each ? std::optional<Tensor>(other(*each)) : std::nullopt);
    return list;
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::ListType) {
    c10::impl::GenericList lists(value.toList().elementType());
    for (const IValue& each : value.toListRef()) lists.push_back(with_tensors(each, other));
    return lists;
  }
  return value;
}

// Returns a tensor over the same memory, with the current shape, which later changes of the other tensor do not affect.
Tensor same_memory(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false));
}

// --- operators -----------------------------------------------------------------------------------------------------

// Operators that return a number or a size from the device, for which the host waits.
const std::set<std::string> WAITING = {
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "bincount",
    "unique_consecutive", "unique_dim_consecutive", "_coalesce", "_linalg_check_errors"};
// Operators that accept host tensors in addition to device tensors, and wait if a host tensor must be copied.
const std::set<std::string> TAKING_HOST_TENSORS = {
    "index", "index_put_", "_index_put_impl_", "index_put", "_ctc_loss", "_ctc_loss_backward"};
const std::set<std::string> TAKING_HOST_LENGTHS = {"_pack_padded_sequence", "set_"};

// Whether an operator waits, for operators that wait only for some arguments: `_index_put_impl_` with a mask whose
// elements the host must count (arguments: self, indices, values, accumulate), and calls that omit an output size.
bool waits_for(const std::string& name, at::ArrayRef<IValue> given) {
  if (name == "repeat_interleave") return given.back().isNone();
  if (name != "_index_put_impl_" || (given[2].toTensor().is_cpu() && !given[3].toBool())) return false;
  auto is_mask = [](const std::optional<Tensor>& index) {
    return index && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
  };
  auto indices = given[1].toOptionalTensorVector();
  return std::any_of(indices.begin(), indices.end(), is_mask);
}

at::SparseTensorImpl* sparse_parts(const Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

std::string base_name(const std::string& name) { return name.substr(name.find("::") + 2); }

struct OnHost {
  std::string name;
  Device device = Device(c10::kCPU);  // device of the results
  bool has_host_tensor = false;
  std::vector<std::pair<Tensor, Tensor>> known;       // pairs (device tensor, host tensor)
  std::vector<std::pair<Storage, Storage>> storages;  // pairs (device storage, host storage)

  void note(const Device& other) {
    if (device.is_cuda() && device != other)
      TORCH_CHECK(name == "copy_" || name.rfind("_foreach", 0) == 0,
          "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ", other,
          "! (", name, ")");
    device = other;
  }

  Storage lowered(const Storage& storage) {
    if (storage.device_type() != c10::kCUDA) return storage;
    auto host = block_of(storage)->host;
    storages.emplace_back(storage, host);
    return host;
  }

  Tensor lowered(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      has_host_tensor |= tensor.dim() > 0;
      return tensor;
    }
    note(tensor.device());
    known.emplace_back(tensor, lowered_anew(tensor));
    return known.back().second;
  }

  Tensor lowered_anew(const Tensor& tensor) {
    if (tensor.is_sparse()) {
      auto* parts = sparse_parts(tensor);
      return at::_sparse_coo_tensor_unsafe(
          lowered(parts->indices()), lowered(parts->values()), tensor.sizes(), {}, {}, {}, {}, parts->coalesced());
    }
    if (tensor.is_sparse_csr()) {
      auto* parts = at::sparse_csr::get_sparse_csr_impl(tensor);
      return at::_sparse_csr_tensor_unsafe(
          lowered(parts->compressed_indices()), lowered(parts->plain_indices()), lowered(parts->values()),
          tensor.sizes(), tensor.scalar_type());
    }
    return tensor_over(lowered(tensor.storage()), DispatchKey::CPU, tensor);
  }

  IValue lowered(const IValue& value) {
    if (value.isStorage()) return lowered(value.toStorage());
    if (value.isGenerator() && value.toGenerator().device().is_cuda())
      return state_to_draw_from(value.toGenerator().device(), value.toGenerator())->host;
    if (value.isDevice() && value.toDevice().is_cuda()) {
      auto index = value.toDevice().index();
      device = Device(c10::kCUDA, index < 0 ? current_device : index);
      return Device(c10::kCPU);
    }
    return with_tensors(value, [this](const Tensor& tensor) { return lowered(tensor); });
  }

  // Converts an argument for a graph: keeps device memory, and copies host tensors.
  IValue captured(const IValue& value) const {
    return with_tensors(value, [this](const Tensor& tensor) {
      for (auto& [_, on_host] : known)
        if (on_host.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) return same_memory(tensor);
      if (!tensor.defined()) return tensor;
      auto frozen = tensor.clone();  // type promotion must still treat a Python number as a number
      frozen.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
      return frozen;
    });
  }

  Storage raised(const Storage& host, caffe2::TypeMeta type) {
    for (auto& [on_device, on_host] : storages)
      if (on_host.unsafeGetStorageImpl() == host.unsafeGetStorageImpl()) return on_device;
    storages.emplace_back(device_storage(host, device.index()), host);
    if (auto* graph = capture_on(device)) graph->own[host.unsafeGetStorageImpl()] = {host, type};
    return storages.back().first;
  }

  Tensor raised(const Tensor& host) {
    if (!host.defined() || host.is_cuda()) return host;
    for (auto& [on_device, on_host] : known)
      if (on_host.unsafeGetTensorImpl() == host.unsafeGetTensorImpl()) return on_device;
    if (host.is_sparse()) {
      auto made = at::detail::make_tensor<at::SparseTensorImpl>(DispatchKeySet(DispatchKey::SparseCUDA), host.dtype());
      auto* parts = sparse_parts(made);
      parts->resize_(host.sparse_dim(), host.dense_dim(), host.sizes());
      parts->set_indices_and_values_unsafe(raised(host._indices()), raised(host._values()));
      parts->set_coalesced(host.is_coalesced());
      return made;
    }
    if (host.is_sparse_csr()) {
      auto made = at::detail::make_tensor<at::SparseCsrTensorImpl>(
          DispatchKeySet(DispatchKey::SparseCsrCUDA), device, host.layout(), host.dtype());
      at::sparse_csr::get_sparse_csr_impl(made)->set_member_tensors(
          raised(host.crow_indices()), raised(host.col_indices()), raised(host.values()), host.sizes());
      return made;
    }
    return tensor_over(raised(host.storage(), host.dtype()), DispatchKey::CUDA, host);
  }

  IValue raised(const IValue& value) {
    return with_tensors(value, [this](const Tensor& tensor) { return raised(tensor); });
  }

  // Copies changes of shapes and memory sizes of arguments from the host tensors to the device tensors.
  void follow() {
    for (auto& [on_device, on_host] : known) {
      if (on_host.layout() != c10::kStrided) continue;
      auto* block = block_of(on_device.storage());
      if (on_host.storage().unsafeGetStorageImpl() != block->host.unsafeGetStorageImpl())
        on_device.unsafeGetTensorImpl()->set_storage_keep_dtype(raised(on_host.storage(), on_host.dtype()));
      else if (int64_t(block->host.nbytes()) != block->bytes)
        follow_size(on_device.storage().unsafeGetStorageImpl(), block);
      if (on_device.sizes() != on_host.sizes() || on_device.strides() != on_host.strides() ||
          on_device.storage_offset() != on_host.storage_offset())
        on_device.unsafeGetTensorImpl()->set_sizes_and_strides(
            on_host.sizes(), on_host.strides(), on_host.storage_offset());
    }
  }
};

void copy(OnHost& call, Stack& stack) {
  bool non_blocking = torch::jit::pop(stack).toBool();
  Tensor source = torch::jit::pop(stack).toTensor(), target = torch::jit::pop(stack).toTensor();
  Tensor from = call.lowered(source), to = call.lowered(target);
  auto index = (source.is_cuda() ? source : target).device().index();
  auto* graph = capture_on(call.device);
  if (graph) {
    graph->check();
    graph->remember(call.storages);
    from = same_memory(from), to = same_memory(to);
  }
  std::function<void()> act = [to, from] { to.copy_(from); };
  if (source.is_cuda() && !target.is_cuda()) {
    if (non_blocking && target.is_pinned()) act = [to, from, index] { copy_later(to, from, index); };
    else host_waits(index, non_blocking ? "copy into memory that is not page-locked" : "copy to the host");
  } else if (!source.is_cuda()) {
    if (non_blocking && source.is_pinned()) act = [to, from, index] { upload(to, from, index); };
    else {
      check_may_wait(index);
      bool refused = told('w', non_blocking ? "copy from memory that is not page-locked" : "copy from the host");
      TORCH_CHECK(non_blocking || !refused, "called a synchronizing CUDA operation");
    }
  }
  if (!graph) act();
  else {
    graph->add(act, call.storages);
    if (target.is_cuda()) to.copy_(from);
  }
  torch::jit::push(stack, target);
}

// Returns the storages of an operator's results, in order.
std::vector<Storage> storages_of(at::ArrayRef<IValue> values) {
  std::vector<Storage> found;
  auto add = [&](const Tensor& tensor) {
    if (tensor.is_sparse()) found.insert(found.end(), {tensor._indices().storage(), tensor._values().storage()});
    else if (tensor.defined() && tensor.layout() == c10::kStrided) found.push_back(tensor.storage());
    return tensor;
  };
  for (auto& value : values) with_tensors(value, add);
  return found;
}

// Runs a captured operator again, and copies its results to the storages of the captured results.
void run_again(
    const c10::OperatorHandle& op, const std::vector<IValue>& arguments, const std::vector<Storage>& results,
    GeneratorState* generator) {
  Stack stack;
  for (auto& argument : arguments) stack.push_back(with_tensors(argument, same_memory));
  {
    std::optional<Drawing> drawing;
    if (generator) drawing.emplace(*generator);
    op.callBoxed(&stack);
  }
  auto now = storages_of(stack);
  for (size_t i = 0; i < now.size(); ++i) {
    if (!results[i] || results[i].unsafeGetStorageImpl() == now[i].unsafeGetStorageImpl()) continue;
    TORCH_INTERNAL_ASSERT(results[i].nbytes() >= now[i].nbytes(), "a replay makes more than its capture: ", op.schema());
    memcpy(bytes_of(results[i]), now[i].data(), now[i].nbytes());
  }
}

void add_to_graph(
    Graph& graph, const OnHost& call, const c10::OperatorHandle& op, const std::vector<IValue>& arguments,
    std::vector<Storage> results, const c10::intrusive_ptr<GeneratorState>& generator) {
  for (auto& storage : results)
    if (!graph.own.count(storage.unsafeGetStorageImpl())) storage = Storage();
  graph.add([=] { run_again(op, arguments, results, generator.get()); }, call.storages);
}

void run_on_host(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  OnHost call;
  call.name = base_name(op.schema().name());
  if (call.name == "copy_") return copy(call, *stack);
  size_t count = op.schema().arguments().size();
  if (call.name == "record_stream") return torch::jit::drop(*stack, count);
  auto given = at::ArrayRef<IValue>(*stack).slice(stack->size() - count);
  bool waits = WAITING.count(call.name) || waits_for(call.name, given);
  for (auto argument = stack->end() - count; argument != stack->end(); ++argument) *argument = call.lowered(*argument);
  bool takes_host = TAKING_HOST_TENSORS.count(call.name);
  TORCH_CHECK(
      !call.has_host_tensor || !call.device.is_cuda() || takes_host || TAKING_HOST_LENGTHS.count(call.name),
      "Expected all tensors to be on the same device, but found at least two devices, ", call.device, " and cpu! (",
      call.name, ")");
  auto* graph = capture_on(call.device);
  if (graph) graph->check();
  if (waits || (takes_host && call.has_host_tensor)) host_waits(call.device.index(), call.name);
  std::vector<IValue> arguments;
  if (graph) {
    graph->remember(call.storages);
    for (auto argument = stack->end() - count; argument != stack->end(); ++argument)
      arguments.push_back(call.captured(*argument));
  }
  c10::intrusive_ptr<GeneratorState> generator;
  {
    std::optional<Drawing> drawing;
    if (op.hasTag(at::Tag::nondeterministic_seeded) && call.device.is_cuda()) {
      generator = state_to_draw_from(call.device, default_generators[call.device.index()]);
      drawing.emplace(*generator);
    }
    op.callBoxed(stack);
  }
  size_t num_known = call.storages.size(), num_results = op.schema().returns().size();
  std::vector<Storage> results;
  if (graph) results = storages_of(at::ArrayRef<IValue>(*stack).slice(stack->size() - num_results));
  call.follow();
  for (auto result = stack->end() - num_results; result != stack->end(); ++result) *result = call.raised(*result);
  // Graphs need no views, and uninitialised memory keeps its marker values.
  bool computes = op.schema().is_mutable() || call.storages.size() > num_known || num_results == 0;
  if (graph && computes && call.name.rfind("empty", 0) != 0)
    add_to_graph(*graph, call, op, arguments, results, generator);
}

// Work of a future that also reports errors, unlike torch's own class.
struct DeviceWork final : c10d::Work {
  c10::intrusive_ptr<c10::ivalue::Future> result;
  explicit DeviceWork(c10::intrusive_ptr<c10::ivalue::Future> result) : result(std::move(result)) {}
  bool isCompleted() override { return result->completed(); }
  bool isSuccess() const override { return result->completed() && !result->hasError(); }
  bool wait(std::chrono::milliseconds) override {
    result->waitAndThrow();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return result; }
};

// Processes exchange host memory by gloo. The returned Work gives device tensors.
c10::intrusive_ptr<c10d::Work> work_on_device(const std::shared_ptr<OnHost>& call, c10d::Work& on_host) {
  auto found = on_host.getFuture();
  auto raised = c10::make_intrusive<c10::ivalue::Future>(found->elementType(), std::vector{call->device});
  found->addCallback([call, raised](c10::ivalue::Future& done) {
    if (done.hasError()) raised->setError(done.exception_ptr());
    else raised->markCompleted(call->raised(done.value()));
  });
  return c10::make_intrusive<DeviceWork>(raised);
}

void exchange(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto call = std::make_shared<OnHost>();
  call->name = base_name(op.schema().name());
  size_t count = op.schema().arguments().size();
  for (auto argument = stack->end() - count; argument != stack->end(); ++argument) *argument = call->lowered(*argument);
  if (capture_on(call->device)) invalidate_capture();
  op.callBoxed(stack);
  for (auto result = stack->end() - op.schema().returns().size(); result != stack->end() - 1; ++result)
    *result = call->raised(*result);
  if (call->name == "allreduce_")  // DistributedDataParallel reads the sum from this Work
    stack->back() = work_on_device(call, *stack->back().toCustomClass<c10d::Work>());
}

// Softmax with 16-bit input and 32-bit output, and its backward, are single kernels only on a GPU.
void softmax(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  auto input = stack->end() - 3;  // dim and half_to_float follow
  if (stack->back().toBool()) {
    *input = input->toTensor().to(at::kFloat);
    stack->back() = false;
  }
  run_on_host(op, keys, stack);
}

void softmax_backward(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  auto type_of_input = stack->back().toScalarType();
  stack->back() = (stack->end() - 4)->toTensor().scalar_type();  // dtype of the gradient
  run_on_host(op, keys, stack);
  stack->back() = stack->back().toTensor().to(type_of_input);
}

// Cell of nn.LSTM, which is a single kernel on a GPU. gates: (batch, 4 x width): input, forget, cell, output.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& before,
    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  auto gates = input_gates + hidden_gates;
  if (input_bias) gates = gates + *input_bias + *hidden_bias;
  auto parts = gates.chunk(4, 1);
  auto i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  auto after = f * before + i * g;
  return {o * after.tanh(), after, at::cat({i, f, g, o}, 1)};
}

Tensor or_zeros(const std::optional<Tensor>& grad, const Tensor& like) {
  return grad && grad->defined() ? *grad : at::zeros_like(like);
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const std::optional<Tensor>& grad_output, const std::optional<Tensor>& grad_after, const Tensor& before,
    const Tensor& after, const Tensor& activated, bool has_bias) {
  auto parts = activated.chunk(4, 1);
  auto &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3];
  auto squashed = after.tanh(), of_output = or_zeros(grad_output, after);
  auto grad = or_zeros(grad_after, after) + of_output * o * (1 - squashed * squashed);
  auto gates = at::cat(
      {grad * g * i * (1 - i), grad * before * f * (1 - f), grad * i * (1 - g * g), of_output * squashed * o * (1 - o)},
      1);
  return {gates, grad * f, has_bias ? gates.sum(0) : Tensor()};
}

// --- interface of a torch backend ----------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device getDevice() const override { return Device(c10::kCUDA, current_device); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  Stream getStream(Device device) const noexcept override { return current_stream(device.index()); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(c10::kCUDA, device.index() < 0 ? current_device : device.index()));
  }
  Stream getNewStream(Device device, int) const override {
    return Stream(Stream::UNSAFE, getDefaultStream(device).device(), ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const noexcept override {
    Stream before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return MOST_GPUS; }
  // Events between streams. All operators run immediately, so an event stores only the capture.
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    auto* graph = capture_of(stream);
    *event = reinterpret_cast<void*>(graph ? graph->number : 0);
  }
  void block(void* event, const Stream& stream) const override {
    wait_for_event(reinterpret_cast<int64_t>(event), stream);
  }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool isStreamCapturing(const Stream& stream) const { return capture_of(stream) != nullptr; }  // since torch 2.12
  bool queryStream(const Stream& stream) const override {
    check_may_wait(stream.device().index());
    return false;
  }
  void synchronizeStream(const Stream& stream) const override {
    host_waits(stream.device().index(), "Stream.synchronize");
  }
  void synchronizeDevice(const DeviceIndex device) const override { host_waits(device, "synchronize"); }
} guard;
c10::impl::DeviceGuardImplRegistrar guard_registered(c10::kCUDA, &guard);

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generators[device < 0 ? ::current_device : device];
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    auto state = c10::make_intrusive<GeneratorState>(at::detail::createCPUGenerator());
    return at::make_generator<DeviceGenerator>(Device(c10::kCUDA, device < 0 ? ::current_device : device), state);
  }
  DeviceIndex deviceCount() const override { return MOST_GPUS; }
  int getNumGPUs() const override { return MOST_GPUS; }
  DeviceIndex current_device() const override { return current_device_(); }
  DeviceIndex getCurrentDevice() const override { return current_device_(); }
  void setCurrentDevice(DeviceIndex device) const override { guard.setDevice(Device(c10::kCUDA, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return guard.exchangeDevice(Device(c10::kCUDA, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(DeviceIndex device) const override { guard.synchronizeDevice(device); }
  static DeviceIndex current_device_() { return ::current_device; }
};

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)  // torch finds the class by this name

// Replaces torch's function, which returns no accelerator in a CPU build. This library is loaded first, so its symbol wins.
std::optional<c10::DeviceType> accelerator::getAccelerator(bool) { return c10::kCUDA; }
}  // namespace at

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(_, SparseCUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrCUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

// Sparse operators that have kernels on the host, but are compositions in other backends.
void take_kernels_of(DispatchKey host, torch::Library& m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) == 0 && op && op->hasKernelForDispatchKey(host))
      m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}
TORCH_LIBRARY_IMPL(aten, SparseCUDA, m) { take_kernels_of(DispatchKey::SparseCPU, m); }
TORCH_LIBRARY_IMPL(aten, SparseCsrCUDA, m) { take_kernels_of(DispatchKey::SparseCsrCPU, m); }

// Compositions that would choose kernels that a CPU build lacks.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (const char* name : {"copy_", "convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  for (const char* name : {"_softmax", "_log_softmax"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&softmax>());
  for (const char* name : {"_softmax_backward_data", "_log_softmax_backward_data"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&softmax_backward>());
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
}

// Replacements of torch's collectives, which would call parts of gloo that a CPU build lacks.
struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

const torch::Library exchanges = [] {
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  torch::Library m(torch::Library::IMPL, "c10d", DispatchKey::CUDA, __FILE__, __LINE__);
  for (const char* name : {"allreduce_", "broadcast_", "allgather_", "_allgather_base_", "_reduce_scatter_base_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&exchange>());
  return m;
}();

// Timer of DistributedDataParallel, which records durations.
struct Timer final : c10d::Timer {
  explicit Timer(Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, ::Timer)
}

// --- for Python ----------------------------------------------------------------------------------------------------

thread_local std::string failure;

// Returns null, or the message of the exception that a function throws.
template <typename Function>
const char* failure_of(const Function& function) {
  try {
    function();
    return nullptr;
  } catch (const c10::Error& error) {
    failure = error.what_without_backtrace();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  return failure.c_str();
}

std::map<int64_t, std::weak_ptr<Pool>> pools;

extern "C" {

void simulated_start(int (*callback)(char, const char*)) {
  tell = callback;
  for (auto& limit : limits) limit = std::numeric_limits<int64_t>::max() / 2;
  c10::SetAllocator(c10::kCUDA, &device_allocator);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(
      [](const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>,
         bool) -> int64_t { return 0; });  // attention as plain operators
  struct sigaction action = {};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &handler_before);
}

int simulated_device() { return current_device; }
void simulated_set_device(int device) { current_device = device; }
int64_t simulated_ticket() { return ++last_ticket; }
const char* simulated_wait(int device, int64_t ticket) {
  return failure_of([=] {
    check_may_wait(device);
    wait_for(device, ticket < 0 ? last_ticket.load() : ticket);
  });
}
int64_t simulated_stream(int device) { return current_streams[device]; }
void simulated_set_stream(int device, int64_t stream) {
  current_device = device;
  current_streams[device] = stream;
}
int64_t simulated_capture(int device, int64_t stream) {
  auto* graph = capture_of(Stream(Stream::UNSAFE, Device(c10::kCUDA, device), stream));
  return graph ? graph->number : 0;
}
const char* simulated_wait_for_event(int64_t capture, int device, int64_t stream) {
  return failure_of([=] { wait_for_event(capture, Stream(Stream::UNSAFE, Device(c10::kCUDA, device), stream)); });
}
void simulated_set_generator(int device, c10::GeneratorImpl* generator) {
  default_generators[device] = at::Generator(c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(generator));
}
const char* simulated_begin(int64_t pool, char mode, Graph** graph) {
  return failure_of([=] {
    auto shared = pools[pool].lock();
    if (!shared) pools[pool] = shared = std::make_shared<Pool>();
    *graph = new Graph(mode, shared);
  });
}
const char* simulated_end(Graph* graph) {
  return failure_of([=] { graph->end(); });
}
const char* simulated_replay(Graph* graph) {
  std::lock_guard<std::recursive_mutex> lock(graphs_lock);
  return failure_of([=] { graph->replay(); });
}
void simulated_delete(Graph* graph) {
  std::lock_guard<std::recursive_mutex> lock(graphs_lock);
  delete graph;
}
int64_t simulated_done(int device) { return done[device]; }
int64_t simulated_used(int device) { return used[device]; }
int64_t simulated_peak(int device) { return peak[device]; }
void simulated_forget_peak(int device) { peak[device] = used[device].load(); }
void simulated_limit(int device, int64_t bytes) { limits[device] = bytes; }
void simulated_resize(c10::StorageImpl* storage, int64_t bytes) {
  auto* block = static_cast<Block*>(storage->data_ptr().get_context());
  at::native::resize_bytes_cpu(block->host.unsafeGetStorageImpl(), bytes);
  follow_size(storage, block);
}
// Returns the number of copies so far whose source the host changed too early.
int simulated_num_changed() {
  for (DeviceIndex device = 0; device < MOST_GPUS; ++device) finish_uploads(device, last_ticket);
  return changed.size();
}
int simulated_changed(int i) { return changed[i]; }
int simulated_num_touched() { return num_touched; }
void simulated_forget_touched() {
  num_touched = 0;
  changed.clear();
}
int simulated_touched(int i) { return touched[i]; }
}
