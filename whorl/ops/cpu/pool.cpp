#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace whorl {
namespace {

// A worker looks for the next job so long before it sleeps: within a step jobs follow each other in microseconds, and
// to wake a thread takes longer than that. Between steps nothing spins.
constexpr auto PATIENCE = std::chrono::microseconds(30);
constexpr int LOOKS = 64;  // between two looks at the clock
constexpr uint64_t COUNT_BITS = 20, COUNT_MASK = (1u << COUNT_BITS) - 1;
constexpr int64_t MOST_PARTS = COUNT_MASK - 1024;  // leaves room for the vain draws of every thread

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One floating point state for every part: rounding to nearest, denormal numbers kept.
struct PlainArithmetic {
#if defined(__x86_64__)
  unsigned before = _mm_getcsr();
  PlainArithmetic() { _mm_setcsr(0x1f80); }
  ~PlainArithmetic() { _mm_setcsr(before); }
#elif defined(__aarch64__)
  uint64_t before;
  PlainArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(before));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t(0)));
  }
  ~PlainArithmetic() { asm volatile("msr fpcr, %0" ::"r"(before)); }
#endif
};

struct Job {
  Part part;
  const void* context;
  std::atomic<int64_t> done;
};

// A ticket is the number of a job, its parts and the next part to be taken, in one word: whoever draws a number below
// the count owns that part, and the job cannot end before it has run. So a thread that comes late takes part in the
// job that is there, or finds nothing to do.
class Pool {
 public:
  void run(Part part, const void* context, int64_t count, int threads) {
    grow(threads - 1);
    active_.store(threads - 1, std::memory_order_relaxed);
    const uint64_t epoch = ++epoch_ & ((1u << 24) - 1);
    Job& job = jobs_[epoch % 4];
    job.part = part, job.context = context;
    job.done.store(0, std::memory_order_relaxed);
    ticket_.store(epoch << 40 | uint64_t(count) << COUNT_BITS, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) wake();
    take();
    wait(job, count);
  }

 private:
  std::atomic<uint64_t> ticket_{0};
  Job jobs_[4];
  uint64_t epoch_ = 0;
  std::atomic<int> sleeping_{0};
  std::mutex mutex_;
  std::condition_variable woken_;
  int workers_ = 0;
  std::atomic<int> active_{0};  // workers from this number on stay idle

  void grow(int workers) {
    for (; workers_ < workers; workers_++) std::thread([this, number = workers_] { work(number); }).detach();
  }

  void wake() {
    { std::lock_guard<std::mutex> guard(mutex_); }
    woken_.notify_all();
  }

  void take() {
    while (true) {
      const uint64_t drawn = ticket_.fetch_add(1, std::memory_order_acq_rel);
      const int64_t i = drawn & COUNT_MASK, count = drawn >> COUNT_BITS & COUNT_MASK;
      if (i >= count) return;
      Job& job = jobs_[(drawn >> 40) % 4];
      job.part(job.context, i);
      job.done.fetch_add(1, std::memory_order_release);
    }
  }

  bool has_work(int worker) const {
    if (worker >= active_.load(std::memory_order_relaxed)) return false;
    const uint64_t now = ticket_.load(std::memory_order_acquire);
    return int64_t(now & COUNT_MASK) < int64_t(now >> COUNT_BITS & COUNT_MASK);
  }

  void work(int number) {
    PlainArithmetic state;
    while (true) {
      auto since = std::chrono::steady_clock::now();
      for (int looks = 1; !has_work(number); looks++) {
        pause();
        if (looks % LOOKS == 0 && std::chrono::steady_clock::now() - since > PATIENCE) {
          sleep(number);
          since = std::chrono::steady_clock::now();
        }
      }
      take();
    }
  }

  void sleep(int number) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    woken_.wait(lock, [this, number] { return has_work(number); });
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
  }

  // The last parts run on other threads, which may have lost their processor: after a while this one leaves its own.
  void wait(const Job& job, int64_t count) {
    auto since = std::chrono::steady_clock::now();
    for (int looks = 1; job.done.load(std::memory_order_acquire) < count; looks++) {
      pause();
      if (looks % LOOKS == 0 && std::chrono::steady_clock::now() - since > PATIENCE) std::this_thread::sleep_for(PATIENCE);
    }
  }
};

Pool* pool = new Pool;  // never destroyed: its threads outlive the end of main
std::mutex in_use;
std::atomic<int> threads{0};

void renew() {  // in a forked child, which has none of the threads
  pool = new Pool;
  new (&in_use) std::mutex;
}

const bool is_prepared = [] { return pthread_atfork(nullptr, nullptr, renew) == 0; }();

}  // namespace

int num_threads() {
  const int count = threads.load(std::memory_order_relaxed);
  return count ? count : std::max(1u, std::thread::hardware_concurrency());
}

void set_num_threads(int count) { threads.store(std::max(count, 1), std::memory_order_relaxed); }

void run_parts(Part part, const void* context, int64_t count) {
  PlainArithmetic state;
  const int most = num_threads();
  if (count > 1 && most > 1 && in_use.try_lock()) {
    std::lock_guard<std::mutex> guard(in_use, std::adopt_lock);
    for (int64_t first = 0; first < count; first += MOST_PARTS) {
      struct Shifted { Part part; const void* context; int64_t first; } shifted{part, context, first};
      pool->run(
          [](const void* context, int64_t i) {
            const auto& shifted = *static_cast<const Shifted*>(context);
            shifted.part(shifted.context, shifted.first + i);
          },
          &shifted, std::min(count - first, MOST_PARTS), most);
    }
    return;
  }
  for (int64_t i = 0; i < count; i++) part(context, i);
}

}  // namespace whorl
