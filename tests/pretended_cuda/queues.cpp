#include "queues.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <thread>

namespace pretended {

static State* the_state = new State; // never destroyed: threads of queues outlive static objects
static std::vector<std::function<void()>> fork_hooks;
static thread_local int tl_device = 0;
static thread_local std::map<int, int64_t> tl_streams;
static thread_local int tl_depth = 0; // tasks that this thread is in

State& state() { return *the_state; }
int& current_device() { return tl_device; }
QueueKey current_queue(int device) {
  if (device < 0) device = tl_device;
  auto found = tl_streams.find(device);
  return {device, found == tl_streams.end() ? 0 : found->second};
}
void set_current_stream(QueueKey key) { tl_streams[key.first] = key.second; }

// At interpreter exit a thread may neither have nor get the GIL.
WithoutGil::WithoutGil() : thread(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
WithoutGil::~WithoutGil() {
  if (thread) PyEval_RestoreThread(static_cast<PyThreadState*>(thread));
}

using Hold = std::unique_lock<std::mutex>;

static void reach(Hold& hold, const Point& point);

static void run_front(Hold& hold, Queue& queue) {
  Task task = std::move(queue.tasks.front());
  queue.tasks.pop_front();
  queue.running = true;
  std::exception_ptr error;
  if (task.after) reach(hold, *task.after);
  hold.unlock();
  tl_depth++;
  try {
    if (task.run) task.run();
  } catch (...) {
    error = std::current_exception();
  }
  task.run = nullptr; // frees tensors, for which the lock is needed, and maybe the GIL
  tl_depth--;
  hold.lock();
  queue.running = false;
  queue.done++;
  auto& s = state();
  s.tasks_run++;
  if (error && !s.error) s.error = error;
  s.changed.notify_all();
}

// A wait of a queue can only be for what was queued before it, so that two queues never wait for each other.
static void reach(Hold& hold, const Point& point) {
  auto& s = state();
  auto& queue = s.queues[point.key];
  while (queue.done < point.at) {
    if (queue.has_thread || queue.running || queue.tasks.empty()) {
      if (queue.has_thread && queue.wanted < point.at) {
        queue.wanted = point.at;
        s.changed.notify_all();
      }
      s.changed.wait(hold);
    } else {
      run_front(hold, queue);
    }
  }
}

static bool is_ready(const Task& task) {
  return !task.after || state().queues[task.after->key].done >= task.after->at;
}

// Run up to `count` tasks that wait for nothing.
static void advance(Hold& hold, Queue& queue, uint64_t count) {
  while (count-- && !queue.has_thread && !queue.running && !queue.tasks.empty() && is_ready(queue.tasks.front()))
    run_front(hold, queue);
}

static void advance_all(Hold& hold, bool side_only) {
  // Again, as long as something has run: it may be what another queue has waited for.
  for (int64_t before = -1; before != state().tasks_run;) {
    before = state().tasks_run;
    for (auto& [key, queue] : state().queues)
      if (!side_only || key.second != 0) advance(hold, queue, UINT64_MAX);
  }
}

// Run what the policy has run by itself when a task is queued. Never what another process must take part in.
static void let_time_pass(Hold& hold) {
  auto& s = state();
  if (tl_depth) return;
  if (s.policy == IN_ORDER || s.policy == SIDE_FIRST) advance_all(hold, s.policy == SIDE_FIRST);
  if (s.policy != RANDOM) return;
  for (uint64_t turns = s.draws() % 3; turns; turns--) {
    auto chosen = s.queues.begin();
    std::advance(chosen, s.draws() % s.queues.size());
    advance(hold, chosen->second, s.draws() % 4);
  }
}

void enqueue(QueueKey key, std::function<void()> run, std::optional<Point> after) {
  auto& s = state();
  TORCH_CHECK(!s.forked, "Cannot re-initialize CUDA in forked subprocess (pretended device)");
  Hold hold(s.lock);
  s.used = true;
  auto& queue = s.queues[key];
  queue.tasks.push_back({std::move(run), after, Clock::now()});
  queue.queued++;
  if (queue.has_thread) s.changed.notify_all();
  let_time_pass(hold);
}

Point end_of(QueueKey key) {
  Hold hold(state().lock);
  return {key, state().queues[key].queued};
}

bool is_reached(const Point& point) {
  Hold hold(state().lock);
  return state().queues[point.key].done >= point.at;
}

void nudge(const Point& point) {
  Hold hold(state().lock);
  auto& queue = state().queues[point.key];
  if (queue.done < point.at) advance_all(hold, false);
  queue.wanted = std::max(queue.wanted, point.at);
  state().changed.notify_all();
}

bool wait_for(const Point& point, std::optional<Clock::time_point> limit) {
  auto& s = state();
  if (s.forked) return true;
  {
    WithoutGil without;
    Hold hold(s.lock);
    auto& queue = s.queues[point.key];
    if (!limit) {
      reach(hold, point);
    } else {
      queue.wanted = std::max(queue.wanted, point.at);
      s.changed.notify_all();
      while (queue.done < point.at)
        if (s.changed.wait_until(hold, *limit) == std::cv_status::timeout && queue.done < point.at) return false;
    }
  }
  raise_error();
  return true;
}

void wait_for_device(int device) {
  std::vector<Point> ends;
  {
    Hold hold(state().lock);
    for (auto& [key, queue] : state().queues)
      if (key.first == device || device < 0) ends.push_back({key, queue.queued});
  }
  for (auto& end : ends) wait_for(end);
}

void note_sync(const char* what) {
  auto& s = state();
  {
    Hold hold(s.lock);
    s.syncs++;
  }
  if (s.sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation: ", what);
  TORCH_CHECK(s.sync_mode != 2, "called a synchronizing CUDA operation: ", what);
}

void raise_error() {
  std::exception_ptr error;
  {
    Hold hold(state().lock);
    std::swap(error, state().error);
  }
  if (error) std::rethrow_exception(error);
}

// How long a communicator lets a collective lie that nobody here waits for: the other ranks may.
static std::chrono::milliseconds patience() {
  switch (state().policy) {
    case LATE: return std::chrono::milliseconds(30);
    case RANDOM: return std::chrono::milliseconds(state().draws() % 30);
    default: return std::chrono::milliseconds(0);
  }
}

void start_thread_of(QueueKey key) {
  auto& s = state();
  Hold hold(s.lock);
  s.queues[key].has_thread = true;
  std::thread([key, &s] {
    Hold hold(s.lock);
    auto& queue = s.queues[key];
    tl_device = key.first;
    for (;;) {
      if (queue.tasks.empty()) {
        if (queue.closed) return;
        s.changed.wait(hold);
        continue;
      }
      auto limit = queue.tasks.front().queued_at + patience();
      while (queue.wanted <= queue.done && Clock::now() < limit) s.changed.wait_until(hold, limit);
      run_front(hold, queue);
    }
  }).detach(); // at the end of the process it may be in a collective that never ends
}

void end_thread_of(QueueKey key) {
  Hold hold(state().lock);
  state().queues[key].closed = true;
  state().changed.notify_all();
}

void set_policy(Policy policy, uint64_t seed) {
  wait_for_device(-1);
  Hold hold(state().lock);
  state().policy = policy;
  state().draws.seed(seed);
}

void on_fork(std::function<void()> in_child) { fork_hooks.push_back(std::move(in_child)); }

static void before_fork() { state().lock.lock(); }
static void after_fork() { state().lock.unlock(); }
static void in_child() { // whose threads are gone, and whose queues may be in the middle of a task
  auto* old = the_state;
  the_state = new State;
  the_state->policy = old->policy;
  the_state->draws = old->draws;
  the_state->devices = old->devices;
  the_state->forked = old->used || old->forked;
  for (auto& hook : fork_hooks) hook();
}
static const int registered = pthread_atfork(before_fork, after_fork, in_child);

} // namespace pretended
