#pragma once
// One process of grammars (grammar_link.h says what passes between): its start and end, frames to it and from it, and how long it may keep
// silent. A process that computes is not silent: the kernel bounds its computing (launch/supervisor/lifecycle/grammar_worker.py). One
// thread; waiting is bounded here, so it counts as progress (common/liveness/progress.h).

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <utility>

namespace poise {

// How long the process may neither speak nor compute.
struct GrammarPatience {
  std::chrono::milliseconds start{120'000};  // a Python from a slow disk, and the model's tokenizer
  std::chrono::milliseconds silence{15'000};
  std::chrono::milliseconds word{5'000};  // until the user is told what is waited for
};

class GrammarProcess {
 public:
  enum class Cause {
    itself,   // by what it computed
    ended,    // it exited
    outside,  // by another's signal
    silence,
  };
  struct Lost {
    Cause cause = Cause::itself;
    std::string how;
  };

  // `stop` is asked while it waits.
  GrammarProcess(std::function<bool()> stop, GrammarPatience patience)
      : stop_(std::move(stop)), patience_(patience) {}
  ~GrammarProcess() { end(); }
  GrammarProcess(const GrammarProcess&) = delete;
  GrammarProcess& operator=(const GrammarProcess&) = delete;

  // An error number, or 0. REQUIRES: none runs.
  int spawn(std::string python, std::string script);
  void end();
  pid_t pid() const { return pid_; }  // 0: none runs

  // A wait begins. `starting`: it may be long.
  void be_patient(bool starting);
  // False: it died, was silent for too long, or `stop` says so. Then `lost` says which, and ends it.
  bool send(const std::string& text);
  bool receive(std::string& payload);
  Lost lost();
  bool stopped();

 private:
  // Until the socket is ready for `events`.
  bool wait(short events);
  std::chrono::nanoseconds computed() const;
  bool halted() const;  // by a signal or a debugger

  std::function<bool()> stop_;
  GrammarPatience patience_;
  pid_t pid_ = 0;
  int socket_ = -1;
  bool stopped_ = false;
  // Of the wait under way.
  std::chrono::milliseconds limit_{}, silent_{};
  bool starting_ = false, told_ = false, gave_up_ = false;
};

}  // namespace poise
