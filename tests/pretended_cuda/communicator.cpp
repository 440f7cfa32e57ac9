// A pretended NCCL: each communicator has queues of its own, in which gloo moves the bytes of device memory. A wait makes
// the stream wait and not the host, and ranks that call different collectives are told so. Also gloo for tensors on the
// device, for which the host waits.
#include "device.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/ivalue_inl.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include <cstdio>
#include <sstream>
#include <thread>

namespace pretended {

using Tensors = std::vector<at::Tensor>;
using c10::intrusive_ptr;
using c10d::OpType;
using c10d::Work;
using Future = c10::ivalue::Future;

static double limit_seconds = 60; // of a collective that another rank has not begun

struct Ended { // the end of a collective, for those who hold its work
  Point point;
  std::mutex lock;
  std::exception_ptr error;
};

class DeviceWork final : public Work {
 public:
  DeviceWork(int rank, OpType type, std::shared_ptr<Ended> ended, Tensors outputs, intrusive_ptr<Future> future, bool host_waits)
      : Work(rank, type), ended_(std::move(ended)), outputs_(std::move(outputs)), future_(std::move(future)), host_waits_(host_waits) {}
  bool isCompleted() override { return is_reached(ended_->point); }
  bool isSuccess() const override { return is_reached(ended_->point) && !exception(); }
  std::exception_ptr exception() const override {
    std::lock_guard<std::mutex> hold(ended_->lock);
    return ended_->error;
  }
  void synchronize() override {
    auto key = current_queue(ended_->point.key.first);
    if (key != ended_->point.key) enqueue(key, nullptr, ended_->point);
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    synchronize();
    if (host_waits_ || opType_ == OpType::BARRIER) {
      std::optional<Clock::time_point> limit;
      if (timeout != kNoTimeout) limit = Clock::now() + timeout;
      TORCH_CHECK(wait_for(ended_->point, limit), "Timed out waiting ", timeout.count(), "ms for ", c10d::opTypeToString(opType_));
      if (auto error = exception()) std::rethrow_exception(error);
    }
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return outputs_; }
  intrusive_ptr<Future> getFuture() override { return future_; }

 private:
  std::shared_ptr<Ended> ended_;
  Tensors outputs_;
  intrusive_ptr<Future> future_;
  bool host_waits_;
};

struct Lane { // a queue of the communicator
  QueueKey key;
  bool of_all_ranks = false;
};

class Communicator final : public c10d::Backend {
 public:
  using Run = std::function<void()>;

  Communicator(intrusive_ptr<c10d::Store> store, intrusive_ptr<c10d::Backend> gloo, std::string name, std::string group)
      : Backend(gloo->getRank(), gloo->getSize()), store_(std::move(store)), gloo_(std::move(gloo)), name_(std::move(name)),
        group_(std::move(group)) {}
  ~Communicator() override {
    for (auto& [of, lane] : lanes_) end_thread_of(lane.key);
  }
  const std::string getBackendName() const override { return name_; }
  bool supportsCoalescing() const override { return is_nccl(); }
  bool supportsSplitting() const override { return false; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return issued_; }
  void setTimeout(std::chrono::milliseconds) override {}

  intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto mine = options;
    return issue(OpType::BROADCAST, "broadcast from " + std::to_string(options.rootRank) + shapes(tensors), tensors, tensors,
                 [this, tensors, mine] { each(tensors, [&](Tensors& one) { return gloo_->broadcast(one, mine); }); });
  }
  intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto op = options.reduceOp;
    return issue(OpType::ALLREDUCE, "all_reduce" + shapes(tensors), tensors, tensors,
                 [this, tensors, op] { for (auto& tensor : tensors) sum(tensor, op); });
  }
  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto op = options.reduceOp;
    bool is_root = options.rootRank == getRank();
    return issue(OpType::REDUCE, "reduce to " + std::to_string(options.rootRank) + shapes(tensors), tensors, tensors,
                 [this, tensors, op, is_root] {
                   for (auto& tensor : tensors) {
                     auto copy = cpu_alias(tensor).clone();
                     sum(copy, op);
                     if (is_root) cpu_alias(tensor).copy_(copy);
                   }
                 });
  }
  intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    auto [to, from] = std::pair(outputs, inputs);
    return issue(OpType::ALLGATHER, "all_gather", flat(to), all(flat(to), from), [this, to, from] {
      for (size_t i = 0; i < from.size(); i++) gather_into(to[i], from[i]);
    });
  }
  intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    Tensors to{output}, from{input};
    return allgather_into_tensor_coalesced(to, from, {});
  }
  intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    auto [to, from] = std::pair(outputs, inputs);
    for (size_t i = 0; i < to.size(); i++)
      TORCH_CHECK(to[i].numel() == from[i].numel() * getSize(), "output of all_gather_into_tensor has another size than all inputs");
    return issue(OpType::_ALLGATHER_BASE, "all_gather_into_tensor" + shapes(from), to, all(to, from), [this, to, from] {
      for (size_t i = 0; i < to.size(); i++) {
        auto parts = cpu_alias(to[i]).view({getSize(), -1}).unbind(0);
        gather_into(parts, cpu_alias(from[i]).reshape({-1}));
      }
    });
  }
  intrusive_ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto [to, from] = std::pair(outputs, inputs);
    auto op = options.reduceOp;
    return issue(OpType::REDUCE_SCATTER, "reduce_scatter" + shapes(flat(from)), to, all(to, flat(from)), [this, to, from, op] {
      for (size_t i = 0; i < to.size(); i++) {
        for (int rank = 0; rank < getSize(); rank++) {
          auto copy = cpu_alias(from[i][rank]).clone();
          sum(copy, op);
          if (rank == getRank()) cpu_alias(to[i]).copy_(copy.view_as(to[i]));
        }
      }
    });
  }
  intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors to{output}, from{input};
    return reduce_scatter_tensor_coalesced(to, from, options);
  }
  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto [to, from] = std::pair(outputs, inputs);
    auto op = options.reduceOp;
    for (size_t i = 0; i < to.size(); i++)
      TORCH_CHECK(from[i].numel() == to[i].numel() * getSize(), "input of reduce_scatter_tensor has another size than all outputs");
    return issue(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor" + shapes(from), to, all(to, from), [this, to, from, op] {
      for (size_t i = 0; i < to.size(); i++) {
        auto copy = cpu_alias(from[i]).clone();
        sum(copy, op);
        auto target = cpu_alias(to[i]);
        target.copy_(copy.reshape({getSize(), -1})[getRank()].view(target.sizes()));
      }
    });
  }
  intrusive_ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto [to, from] = std::pair(outputs, inputs);
    return issue(OpType::GATHER, "gather to " + std::to_string(options.rootRank) + shapes(from), flat(to), all(flat(to), from), [this, to, from] {
      Tensors copies;
      for (int rank = 0; rank < getSize(); rank++) copies.push_back(at::empty_like(cpu_alias(from[0])));
      gather_into(copies, from[0]);
      for (size_t rank = 0; !to.empty() && rank < copies.size(); rank++) cpu_alias(to[0][rank]).copy_(copies[rank]);
    });
  }
  intrusive_ptr<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto [to, from] = std::pair(outputs, inputs);
    auto mine = options;
    return issue(OpType::SCATTER, "scatter from " + std::to_string(options.rootRank) + shapes(to), to, all(to, flat(from)), [this, to, from, mine] {
      Tensors on_host = aliases(to);
      std::vector<Tensors> parts;
      for (auto& list : from) parts.push_back(aliases(list));
      finish(gloo_->scatter(on_host, parts, mine));
    });
  }
  intrusive_ptr<Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    auto [to, from, to_splits, from_splits, mine] = std::tuple(output, input, output_splits, input_splits, options);
    return issue(OpType::ALLTOALL_BASE, "all_to_all_single", {to}, {to, from}, [this, to, from, to_splits, from_splits, mine]() mutable {
      auto target = cpu_alias(to), source = cpu_alias(from);
      finish(gloo_->alltoall_base(target, source, to_splits, from_splits, mine));
    });
  }
  intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto [to, from, mine] = std::tuple(outputs, inputs, options);
    return issue(OpType::ALLTOALL, "all_to_all", to, all(to, from), [this, to, from, mine]() mutable {
      Tensors parts;
      std::vector<int64_t> to_sizes, from_sizes;
      for (auto& tensor : from) parts.push_back(cpu_alias(tensor).reshape({-1})), from_sizes.push_back(tensor.numel());
      for (auto& tensor : to) to_sizes.push_back(tensor.numel());
      auto source = at::cat(parts);
      auto target = at::empty({std::accumulate(to_sizes.begin(), to_sizes.end(), int64_t(0))}, source.options());
      finish(gloo_->alltoall_base(target, source, to_sizes, from_sizes, mine));
      auto received = target.split_with_sizes(to_sizes);
      for (size_t i = 0; i < to.size(); i++) cpu_alias(to[i]).copy_(received[i].view(to[i].sizes()));
    });
  }
  intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    auto mine = options;
    return issue(OpType::BARRIER, "barrier", {}, {}, [this, mine] { finish(gloo_->barrier(mine)); });
  }
  intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    return transfer(OpType::SEND, tensors, getRank(), to, to, tag);
  }
  intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    return transfer(OpType::RECV, tensors, from, getRank(), from, tag);
  }

  // NCCL has one group of calls for all that is issued in between: none of them waits for another.
  void startCoalescing() override { is_coalescing_ = true; }
  intrusive_ptr<Work> endCoalescing() override {
    is_coalescing_ = false;
    auto held = std::move(coalesced_);
    coalesced_.clear();
    if (held.empty()) return make_work(OpType::COALESCED, {}, end_of(current_queue()), std::make_shared<Ended>());
    Tensors outputs, tensors;
    for (auto& one : held) outputs = all(outputs, one.outputs), tensors = all(tensors, one.tensors);
    int device = tensors.empty() ? current_device() : tensors[0].get_device();
    return queued(OpType::COALESCED, lane(device, -1, "several calls in one group"), outputs, tensors, [this, held] {
      for (auto& one : held)
        if (one.post) one.post();
      for (auto& one : held)
        if (one.meet) one.meet();
      Pending pending;
      pending_ = &pending;
      for (auto& one : held) one.run();
      pending_ = nullptr;
      for (auto& work : pending) work->wait();
    });
  }

 private:
  using Pending = std::vector<intrusive_ptr<Work>>;
  struct Issued {
    Tensors outputs, tensors;
    Run run;
    Run post, meet; // of a send or recv: say that it is here, and wait until its other end is
  };

  bool is_nccl() const { return name_ == "nccl"; }

  Lane& lane(int device, int peer, const std::string& what) {
    std::unique_lock<std::mutex> hold(lock_);
    auto& found = lanes_[{device, peer}];
    if (found.key.second == 0) {
      {
        std::unique_lock<std::mutex> hold_queues(state().lock);
        found.key = {device, state().next_stream++};
      }
      found.of_all_ranks = peer < 0;
      start_thread_of(found.key);
      auto number = ++connections_[peer];
      hold.unlock();
      if (is_nccl()) connect(peer, number, what);
    }
    return found;
  }

  // The first message of a communicator waits on the host until its ranks have come: NCCL connects them there. Ranks
  // that use two communicators for the first time in different orders wait for each other.
  void connect(int peer, int number, const std::string& what) {
    auto pair = peer < 0 ? "all" : std::to_string(std::min(peer, getRank())) + "-" + std::to_string(std::max(peer, getRank()));
    auto place = "connection/" + pair + "/" + std::to_string(number) + "/";
    store_->set(place + std::to_string(getRank()), "here");
    for (int rank = peer < 0 ? 0 : peer; rank < (peer < 0 ? getSize() : peer + 1); rank++)
      await(place + std::to_string(rank), what, rank);
  }

  static std::string shapes(const Tensors& tensors) {
    std::ostringstream out;
    for (auto& tensor : tensors) out << " " << tensor.sizes() << " " << tensor.scalar_type();
    return out.str();
  }
  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors out;
    for (auto& list : lists) out.insert(out.end(), list.begin(), list.end());
    return out;
  }
  static Tensors all(Tensors first, const Tensors& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
  }
  static Tensors aliases(const Tensors& tensors) {
    Tensors out;
    for (auto& tensor : tensors) out.push_back(cpu_alias(tensor));
    return out;
  }
  void finish(const intrusive_ptr<Work>& work) {
    if (pending_) pending_->push_back(work);
    else work->wait();
  }
  template <typename Call>
  void each(const Tensors& tensors, const Call& call) {
    for (auto& tensor : tensors) {
      auto on_host = cpu_alias(tensor);
      bool is_dense = on_host.is_contiguous(); // gloo sends what lies together
      Tensors one{is_dense ? on_host : on_host.contiguous()};
      call(one)->wait();
      if (!is_dense) on_host.copy_(one[0]);
    }
  }
  void sum(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    bool is_mean = op.op_ == c10d::ReduceOp::AVG; // which gloo does not have
    c10d::AllreduceOptions options;
    options.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    each({tensor}, [&](Tensors& one) { return gloo_->allreduce(one, options); });
    if (is_mean) cpu_alias(tensor).div_(getSize());
  }
  void gather_into(const Tensors& outputs, const at::Tensor& input) {
    auto source = cpu_alias(input).contiguous();
    std::vector<Tensors> copies(1);
    for (int rank = 0; rank < getSize(); rank++) copies[0].push_back(at::empty_like(source));
    Tensors sources{source};
    gloo_->allgather(copies, sources, {})->wait();
    for (int rank = 0; rank < getSize(); rank++) {
      auto target = cpu_alias(outputs[rank]);
      target.copy_(copies[0][rank].view(target.sizes()));
    }
  }

  intrusive_ptr<Work> make_work(OpType type, Tensors outputs, Point point, std::shared_ptr<Ended> ended) {
    ended->point = point;
    return c10::make_intrusive<DeviceWork>(getRank(), type, ended, outputs, nullptr, !is_nccl());
  }

  // Queue a collective of all ranks.
  intrusive_ptr<Work> issue(OpType type, const std::string& what, Tensors outputs, Tensors tensors, Run run) {
    int device = tensors.empty() ? current_device() : tensors[0].get_device();
    for (auto& tensor : tensors)
      TORCH_CHECK(tensor.is_cuda() && tensor.get_device() == device, what, ": tensors are on ", tensor.device(), " and cuda:", device);
    auto number = ++issued_;
    auto numbered = "#" + std::to_string(number) + " " + what;
    auto& on = lane(device, -1, numbered);
    Run meet = [this, numbered, number] {
      if (is_nccl()) agree(numbered, number);
    };
    if (is_coalescing_) {
      coalesced_.push_back({outputs, tensors, [this, run] {
        auto* pending = std::exchange(pending_, nullptr); // several in one group run one after the other
        run();
        pending_ = pending;
      }, nullptr, meet});
      return nullptr;
    }
    return queued(type, on, outputs, tensors, [run, meet] {
      meet();
      run();
    });
  }

  intrusive_ptr<Work> queued(OpType type, Lane& on, Tensors outputs, Tensors tensors, Run run) {
    auto ended = std::make_shared<Ended>();
    int device = on.key.first;
    auto key = on.key;
    intrusive_ptr<Future> future = c10::make_intrusive<Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{c10::Device(CUDA, device)});
    // The tensors are held until the collective has run, as NCCL's work holds them.
    bool host_waits = !is_nccl();
    // In the order of the calls also if they are on several devices, which have one gloo.
    if (on.of_all_ranks && last_ && last_->key != key) enqueue(key, nullptr, *last_);
    // So is this communicator.
    auto self = intrusive_ptr<Communicator>::unsafe_reclaim_from_nonowning(this);
    enqueue(key, [run, ended, tensors, self] {
      BelowAutograd below;
      try {
        run();
      } catch (...) {
        std::lock_guard<std::mutex> hold(ended->lock);
        ended->error = std::current_exception();
        throw;
      }
    }, end_of(current_queue(device)));
    ended->point = end_of(key);
    if (on.of_all_ranks) last_ = ended->point;
    auto complete = [future, outputs, key, ended] {
      c10::StreamGuard on_lane(c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, key.first), key.second));
      std::exception_ptr error;
      {
        std::lock_guard<std::mutex> hold(ended->lock);
        error = ended->error;
      }
      if (error) future->setError(error);
      else future->markCompleted(c10::IValue(outputs));
    };
    if (!host_waits) {
      complete(); // on the lane's stream: those who use the value wait for the stream
    } else {
      // Not in the queue: what then runs may wait for the queue.
      auto point = ended->point;
      std::thread([complete, point] {
        try {
          wait_for(point);
        } catch (...) { // the work has the error
        }
        complete();
      }).detach();
    }
    return c10::make_intrusive<DeviceWork>(getRank(), type, ended, outputs, future, host_waits);
  }

  intrusive_ptr<Work> transfer(OpType type, Tensors& given, int from, int to, int peer, int tag) {
    TORCH_CHECK(is_nccl(), "gloo sends no tensors of a CUDA device");
    auto tensors = given;
    TORCH_CHECK(tensors.size() == 1 && tensors[0].is_cuda(), "send and recv of nccl take one CUDA tensor");
    TORCH_CHECK(tensors[0].is_contiguous(), "Tensors must be contiguous");
    bool sends = type == OpType::SEND;
    auto way = std::to_string(from) + "-" + std::to_string(to);
    uint64_t number;
    {
      std::lock_guard<std::mutex> hold(lock_);
      number = ++transfers_[way];
    }
    auto place = "p" + way + "/" + std::to_string(number);
    auto what = std::string(sends ? "send" : "recv") + " #" + std::to_string(number) + " from " + std::to_string(from) + " to " +
        std::to_string(to) + shapes(tensors);
    Run run = [this, tensors, sends, peer, tag] {
      Tensors one{cpu_alias(tensors[0])};
      finish(sends ? gloo_->send(one, peer, tag) : gloo_->recv(one, peer, tag));
    };
    auto post = [this, place, what] { store_->set(place + "/" + std::to_string(getRank()), what); };
    auto meet = [this, place, what, peer, tensors] {
      auto theirs = await(place + "/" + std::to_string(peer), what, peer);
      auto size_of = [](const std::string& text) { return text.substr(text.find('[')); };
      TORCH_CHECK(size_of(theirs) == size_of(what), describe(), ": ", what, ", but rank ", peer, " has ", theirs);
      store_->deleteKey(place + "/" + std::to_string(peer));
    };
    if (is_coalescing_) {
      coalesced_.push_back({sends ? Tensors{} : tensors, tensors, run, post, meet});
      return nullptr;
    }
    // A queue for each pair, as NCCL has a communicator for each.
    return queued(type, lane(tensors[0].get_device(), peer, what), sends ? Tensors{} : tensors, tensors, [run, post, meet] {
      post();
      meet();
      run();
    });
  }

  std::string describe() const {
    return "rank " + std::to_string(getRank()) + " of " + std::to_string(getSize()) + " in nccl group " + group_;
  }

  // The text that a rank has put in the store; says who waits for what where it does not come.
  std::string await(const std::string& key, const std::string& what, int rank) {
    auto start = Clock::now();
    auto pause = std::chrono::microseconds(200);
    while (!store_->check({key})) {
      if (Clock::now() - start > std::chrono::duration<double>(limit_seconds)) {
        std::ostringstream message;
        message << describe() << " has waited " << limit_seconds << " s in " << what << "; rank " << rank
                << " has not begun it. Do all ranks call the same collectives in the same order?";
        fprintf(stderr, "%s\n", message.str().c_str());
        TORCH_CHECK(false, message.str());
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(4000));
    }
    return store_->get_to_str(key);
  }

  // Every rank says what it calls, and compares: NCCL would hang, or sum what does not belong together.
  void agree(const std::string& what, uint64_t number) {
    auto place = [&](uint64_t n, int rank) { return std::to_string(n) + "/" + std::to_string(rank); };
    store_->set(place(number, getRank()), what);
    bool differs = false;
    std::ostringstream table;
    for (int rank = 0; rank < getSize(); rank++) {
      auto theirs = await(place(number, rank), what, rank);
      differs |= theirs != what;
      table << "\n  rank " << rank << ": " << theirs;
    }
    if (differs) {
      auto message = describe() + ": the ranks call different collectives, which hangs:" + table.str();
      fprintf(stderr, "%s\n", message.c_str());
      TORCH_CHECK(false, message);
    }
    if (number > 1) store_->deleteKey(place(number - 1, getRank())); // all have read it: they have come this far
  }

  intrusive_ptr<c10d::Store> store_;
  intrusive_ptr<c10d::Backend> gloo_;
  std::string name_, group_;
  std::mutex lock_;
  std::map<std::pair<int, int>, Lane> lanes_; // by device, and peer or -1
  std::map<int, int> connections_; // by peer or -1
  std::map<std::string, uint64_t> transfers_;
  std::vector<Issued> coalesced_;
  Pending* pending_ = nullptr;
  bool is_coalescing_ = false;
  uint64_t issued_ = 0;
  std::optional<Point> last_; // end of what all ranks have called last
};

// torch's DDP asks for the times of a step.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimeRef(start), to = getTimeRef(end);
    if (from == c10d::kUnsetTime || to == c10d::kUnsetTime || to < from) return std::nullopt;
    return to - from;
  }
};

} // namespace pretended

namespace c10d {
using PretendedTimer = pretended::Timer;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, PretendedTimer);
} // namespace c10d

void bind_communicator(py::module& m) {
  using pretended::Communicator;
  m.def("set_limit_seconds", [](double seconds) { pretended::limit_seconds = seconds; });
  // The classes of c10d that it takes are known to pybind11 once torch.distributed is imported.
  m.def("bind_communicator", [m]() mutable {
    py::class_<Communicator, c10::intrusive_ptr<Communicator>, c10d::Backend>(m, "Communicator")
        .def(py::init<c10::intrusive_ptr<c10d::Store>, c10::intrusive_ptr<c10d::Backend>, std::string, std::string>());
  });
}
