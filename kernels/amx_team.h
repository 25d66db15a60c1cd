// The threads of a step: one that leads, and helpers that take part where they can.
//
// A step has some 270 operations, each of which has to be finished before the next one begins. With a barrier after
// each, all threads have to arrive at it, and on a machine that has other things to do the one that just does not run
// holds up all: a step took five times as long as with one thread. Here nobody waits for anybody who has not taken work:
//
//      leader   publishes units 0..n-1 ── takes units until none is left ── waits for those still being worked on ── next
//      helpers                            take units, when they run
//
// A ticket holds the operation's number and the next free unit in one word: whoever comes late finds another number
// in it and takes nothing.

#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "amx_attention.h"

namespace {

class Team {
 public:
  using Work = void (*)(void* context, int64_t unit, int worker);

  // The one team of the process. Its threads live as long as the process does.
  static Team& one() {
    static Team* team = new Team;
    return *team;
  }

  // Whoever holds the team for a step; others work alone meanwhile.
  class Hold {
   public:
    // `threads`: the leader and at most so many helpers less one take part.
    explicit Hold(int threads) : team_(one()), held_(threads > 1 && team_.owner_.try_lock()) {
      if (held_) team_.wake(threads - 1);
    }
    ~Hold() {
      if (!held_) return;
      team_.rest();
      team_.owner_.unlock();
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

    // All units of one operation; returns when all are done. The caller is worker 0.
    void run(int64_t units, Work work, void* context) {
      if (held_ && units > 1) return team_.lead(units, work, context);
      for (int64_t unit = 0; unit < units; ++unit) work(context, unit, 0);
    }

   private:
    Team& team_;
    bool held_;
  };

 private:
  static constexpr uint64_t UNIT_BITS = 24;
  static constexpr uint64_t UNITS = (uint64_t(1) << UNIT_BITS) - 1;

  void wake(int helpers) {
    while (made_ < helpers) {
      try {
        std::thread([this, worker = made_ + 1] { help(worker); }).detach();
      } catch (const std::exception&) {
        break;  // no more threads to be had: those that there are do
      }
      ++made_;
    }
    {
      std::lock_guard<std::mutex> lock(sleep_);
      active_.store(helpers, std::memory_order_relaxed);
    }
    wakened_.notify_all();
  }

  void rest() { active_.store(0, std::memory_order_relaxed); }

  void lead(int64_t units, Work work, void* context) {
    // First no unit is to be had: with the old ticket and the new count a helper would take one that is none.
    ticket_.store(++operation_ << UNIT_BITS | UNITS, std::memory_order_relaxed);
    units_.store(units, std::memory_order_release);
    work_.store(work, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(operation_ << UNIT_BITS, std::memory_order_release);
    take(0);
    for (int turns = 0; done_.load(std::memory_order_acquire) < units; ++turns) {
      _mm_pause();
      if (turns > 2000) sched_yield();  // a helper has a unit and does not run
    }
  }

  // Takes units of the current operation until none is left. Returns whether there was one.
  bool take(int worker) {
    bool any = false;
    for (;;) {
      uint64_t ticket = ticket_.load(std::memory_order_acquire);
      const int64_t unit = int64_t(ticket & UNITS);
      const int64_t units = units_.load(std::memory_order_acquire);
      const Work work = work_.load(std::memory_order_relaxed);
      void* const context = context_.load(std::memory_order_relaxed);
      // Whoever overslept the end of an operation with more threads has no scratch memory in this one.
      if (unit >= units || worker > active_.load(std::memory_order_relaxed)) return any;
      // What was read belongs to this ticket if the ticket is still the same.
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      work(context, unit, worker);
      done_.fetch_add(1, std::memory_order_release);
      any = true;
    }
  }

  void help(int worker) {
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(sleep_);
        wakened_.wait(lock, [&] { return active_.load(std::memory_order_relaxed) >= worker; });
      }
      use_tiles();
      for (int idle = 0; active_.load(std::memory_order_relaxed) >= worker;) {
        if (take(worker)) {
          idle = 0;
        } else {
          _mm_pause();
          if (++idle > 2000) sched_yield();
        }
      }
      _tile_release();
    }
  }

  std::mutex owner_, sleep_;
  std::condition_variable wakened_;
  std::atomic<int> active_{0};
  int made_ = 0;
  uint64_t operation_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int64_t> units_{0};
  std::atomic<Work> work_{nullptr};
  std::atomic<void*> context_{nullptr};
};

}  // namespace
