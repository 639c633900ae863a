// A thread pool whose helpers share the pieces of a task with the caller.
//
// The caller takes pieces like the helpers, and waits only for helpers that have taken one: if another process occupies
// the other cores, it computes everything itself, as fast as alone. (A barrier, as at the end of OpenMP's loops, waits
// even for threads that have not woken up.) Helpers spin during a call and a moment longer, and sleep between calls.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

class Team {
 public:
  // Never destroyed: a helper may still wait in it when the process ends.
  static Team& instance() {
    static Team* const team = new Team;
    return *team;
  }

  // Claims the team for one caller; false if another has it.
  bool enter(int64_t num_threads) {
    if (is_taken_.exchange(true, std::memory_order_acquire)) return false;
    std::unique_lock<std::mutex> lock(mutex_);
    num_helpers_.store(num_threads - 1, std::memory_order_relaxed);
    for (; num_started_ < num_threads - 1; ++num_started_) std::thread(&Team::help, this, num_started_).detach();
    is_open_.store(true, std::memory_order_release);
    lock.unlock();
    opened_.notify_all();
    return true;
  }

  void leave() {
    is_open_.store(false, std::memory_order_release);
    is_taken_.store(false, std::memory_order_release);
  }

  using Piece = void (*)(const void* task, int64_t index);

  // Returns when all pieces are done.
  void run(const void* task, Piece piece, int64_t count) {
    // No helper reads these now: all taken pieces are done, and none is left.
    task_.store(task, std::memory_order_relaxed);
    piece_.store(piece, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t serial = (ticket_.load(std::memory_order_relaxed) >> 2 * kBits) + 1;
    ticket_.store(serial << 2 * kBits | static_cast<uint64_t>(count) << kBits, std::memory_order_release);
    while (take_one()) {
    }
    for (int64_t spins = 0; done_.load(std::memory_order_acquire) < count; ++spins) pause(spins);
  }

  static constexpr int kBits = 20;  // bits of a count of pieces

 private:
  // Spins before a thread yields its core to others.
  static constexpr int64_t kSpins = 2000;
  static constexpr std::chrono::microseconds kLinger{100};

  static void pause(int64_t spins) {
    if (spins < kSpins)
      _mm_pause();
    else
      std::this_thread::yield();
  }

  // One atomic word: task number, number of pieces, pieces taken. So a late helper cannot take a piece of another task.
  bool take_one() {
    constexpr uint64_t kMask = (1 << kBits) - 1;
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    do {
      if ((ticket & kMask) >= (ticket >> kBits & kMask)) return false;
    } while (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    piece_.load(std::memory_order_relaxed)(task_.load(std::memory_order_relaxed), ticket & kMask);
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  void help(int64_t number) {
    const auto is_wanted = [this, number] {
      return is_open_.load(std::memory_order_acquire) && number < num_helpers_.load(std::memory_order_relaxed);
    };
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        opened_.wait(lock, is_wanted);
      }
      auto until = std::chrono::steady_clock::now() + kLinger;
      for (int64_t spins = 0;; ++spins) {
        if (take_one()) spins = 0;
        if (spins % 64 != 63) {
          pause(spins);
          continue;
        }
        const auto now = std::chrono::steady_clock::now();
        if (is_wanted())
          until = now + kLinger;
        else if (now > until)
          break;
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable opened_;
  std::atomic<bool> is_taken_{false};
  int64_t num_started_ = 0;
  alignas(64) std::atomic<bool> is_open_{false};
  std::atomic<int64_t> num_helpers_{0};
  std::atomic<const void*> task_{nullptr};
  std::atomic<Piece> piece_{nullptr};
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

// Holds the team during a call; the caller works alone if it wants one thread or another caller has the team.
class Threads {
 public:
  explicit Threads(int64_t num_threads) : team_(nullptr), count_(1) {
    if (num_threads < 2 || !Team::instance().enter(num_threads)) return;
    team_ = &Team::instance();
    count_ = num_threads;
  }
  ~Threads() {
    if (team_ != nullptr) team_->leave();
  }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int64_t count() const { return count_; }

  // Calls piece(0) … piece(count − 1) in any order, concurrently; count < 2^20.
  template <typename F>
  void each(int64_t count, const F& piece) const {
    if (team_ == nullptr || count < 2) {
      for (int64_t index = 0; index < count; ++index) piece(index);
      return;
    }
    team_->run(&piece, [](const void* task, int64_t index) { (*static_cast<const F*>(task))(index); }, count);
  }

 private:
  Team* team_;
  int64_t count_;
};
