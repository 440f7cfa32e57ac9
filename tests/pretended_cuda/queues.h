// Queues of a device that is not there: what a stream is given to do, and who runs it when.
#pragma once
#include <c10/core/Stream.h>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace pretended {

using Clock = std::chrono::steady_clock;
using QueueKey = std::pair<int, int64_t>; // device, stream

// A place in a queue: reached once `at` of its tasks have run.
struct Point {
  QueueKey key{0, 0};
  uint64_t at = 0;
};

struct Task {
  std::function<void()> run;
  std::optional<Point> after; // another queue has to get there first
  Clock::time_point queued_at{};
};

struct Queue {
  std::deque<Task> tasks;
  uint64_t queued = 0, done = 0;
  bool running = false; // a thread is in a task of this queue: tasks of a queue run one after the other
  bool has_thread = false; // run by a thread of its own, as a task may wait for another process
  bool closed = false; // the thread ends once it has run what is here
  uint64_t wanted = 0; // somebody waits until `done` is this
};

enum Policy { IN_ORDER, LATE, SIDE_FIRST, RANDOM };

struct State {
  std::mutex lock; // guards queues and memory, and is never held while a task runs, which may need the GIL
  std::condition_variable changed;
  std::map<QueueKey, Queue> queues; // a map, as references to queues are kept while others are added
  std::exception_ptr error; // of the first task that failed; raised by the next wait, as CUDA does
  Policy policy = IN_ORDER;
  std::mt19937_64 draws{0};
  int devices = 0;
  int sync_mode = 0; // 0 none, 1 warn, 2 raise
  int64_t next_stream = 100; // those below are torch's pool
  int64_t syncs = 0, tasks_run = 0;
  bool used = false;
  bool forked = false; // from a process that had used the device: nothing can run here
};

State& state();
QueueKey current_queue(int device = -1);
int& current_device();
void set_current_stream(QueueKey key);

void enqueue(QueueKey key, std::function<void()> run, std::optional<Point> after = std::nullopt);
Point end_of(QueueKey key);
bool is_reached(const Point& point);
// Let time pass for somebody who only asks: runs what can run without another process.
void nudge(const Point& point);
// Return once the point is reached; without the GIL, which a task may need. False: the limit has passed.
bool wait_for(const Point& point, std::optional<Clock::time_point> limit = std::nullopt);
void wait_for_device(int device);
// Count a wait of the host that torch's set_sync_debug_mode tells about, and raise if it is asked to.
void note_sync(const char* what);
void raise_error();
void start_thread_of(QueueKey key);
void end_thread_of(QueueKey key);
void set_policy(Policy policy, uint64_t seed);
void on_fork(std::function<void()> in_child);

struct WithoutGil {
  WithoutGil();
  ~WithoutGil();
  void* thread;
};

} // namespace pretended
