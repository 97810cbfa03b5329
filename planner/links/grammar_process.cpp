#include "planner/links/grammar_process.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <utility>

#include "common/liveness/progress.h"
#include "common/trouble.h"
#include "planner/links/announce.h"

namespace poise {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::uint32_t kLongestFrame = 64 << 20;
constexpr milliseconds kLook{100};
constexpr int kLongestExit = 5'000;  // milliseconds from the end of its socket to its own

double seconds(milliseconds time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

int GrammarProcess::spawn(std::string python, std::string script) {
  std::array<int, 2> pair{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()) != 0) {
    fail("the process of grammars: {}", std::strerror(errno));
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pair[1], STDIN_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setpgroup(&attributes, 0);  // a terminal's interrupt is not for it
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
  std::array<std::string, 3> words{std::move(python), "-s", std::move(script)};
  std::array<char*, 4> argv{words[0].data(), words[1].data(), words[2].data(), nullptr};
  const int error =
      posix_spawn(&pid_, words[0].c_str(), &actions, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  close(pair[1]);
  socket_ = pair[0];
  if (error != 0) {
    pid_ = 0;
    end();
  }
  return error;
}

void GrammarProcess::end() {
  if (socket_ >= 0) {
    close(std::exchange(socket_, -1));
  }
  if (pid_ != 0) {
    kill(pid_, SIGKILL);
    waitpid(std::exchange(pid_, 0), nullptr, 0);
  }
}

GrammarProcess::Lost GrammarProcess::lost() {
  const bool silent = stopped_ || gave_up_;
  close(std::exchange(socket_, -1));
  int status = 0;
  pid_t ended = waitpid(pid_, &status, WNOHANG);
  for (int waited = 0; ended == 0 && !silent && waited < kLongestExit; ++waited) {
    usleep(1000);
    note_progress();
    ended = waitpid(pid_, &status, WNOHANG);
  }
  Lost lost{.how = "took more than its time of computing"};
  if (ended != 0 && WIFSIGNALED(status) && WTERMSIG(status) != SIGPROF) {
    const int number = WTERMSIG(status);
    const bool crash =
        number == SIGSEGV || number == SIGABRT || number == SIGBUS || number == SIGILL;
    lost = {.cause = crash ? Cause::itself : Cause::outside,
            .how = fmt::format("was ended by signal {}", number)};
  } else if (ended != 0 && WIFEXITED(status)) {
    lost = {.cause = Cause::ended, .how = fmt::format("ended with {}", WEXITSTATUS(status))};
  } else if (ended == 0 && !silent) {
    lost = {.cause = Cause::ended, .how = "broke off"};
  } else if (ended == 0) {
    lost = {.cause = Cause::silence,
            .how = fmt::format("neither spoke nor computed for {:.3g} s",
                               seconds(limit_))};
  }
  if (ended != 0) {
    pid_ = 0;
  }
  end();
  return lost;
}

void GrammarProcess::be_patient(bool starting) {
  limit_ = starting ? patience_.start : patience_.silence;
  silent_ = {};
  starting_ = starting;
  told_ = gave_up_ = false;
}

bool GrammarProcess::stopped() {
  stopped_ = stopped_ || (stop_ && stop_());
  return stopped_;
}

std::chrono::nanoseconds GrammarProcess::computed() const {
  clockid_t clock{};
  timespec time{};
  if (clock_getcpuclockid(pid_, &clock) != 0 || clock_gettime(clock, &time) != 0) {
    return {};
  }
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

bool GrammarProcess::halted() const {
  siginfo_t state{};
  return waitid(P_PID, static_cast<id_t>(pid_), &state, WSTOPPED | WNOHANG | WNOWAIT) == 0 &&
         state.si_pid == pid_;
}

bool GrammarProcess::wait(short events) {
  auto looked = steady_clock::now();
  auto before = computed();
  for (;;) {
    if (stopped()) {
      return false;
    }
    pollfd socket{.fd = socket_, .events = events, .revents = 0};
    const int ready = poll(&socket, 1, kLook.count());
    if (ready < 0 && errno != EINTR) {
      fail("the process of grammars: {}", std::strerror(errno));
    }
    note_progress();
    if (ready > 0) {
      return true;
    }
    // A longer gap means that we were halted ourselves.
    const auto now = steady_clock::now();
    silent_ += std::min(std::chrono::duration_cast<milliseconds>(now - looked), 2 * kLook);
    looked = now;
    if (const auto until_now = computed(); until_now != before) {
      before = until_now;
      silent_ = {};
    }
    if (halted()) {  // however long its start may take
      limit_ = std::min(limit_, patience_.silence);
    }
    if (silent_ >= limit_) {
      gave_up_ = true;
      return false;
    }
    if (silent_ >= patience_.word && !std::exchange(told_, true)) {
      announce(starting_ ? "the process of grammars is being started"
                         : fmt::format("waiting for the process of grammars, which has neither "
                                       "spoken nor computed for {:.3g} s",
                                       seconds(patience_.word)));
    }
  }
}

bool GrammarProcess::send(const std::string& text) {
  std::string frame(sizeof(std::uint32_t), '\0');
  const auto length = static_cast<std::uint32_t>(text.size());
  std::memcpy(frame.data(), &length, sizeof(length));
  frame += text;
  for (std::size_t sent = 0; sent < frame.size();) {
    const ssize_t some = ::send(socket_, frame.data() + sent, frame.size() - sent,
                                MSG_NOSIGNAL | MSG_DONTWAIT);
    if (some > 0) {
      sent += static_cast<std::size_t>(some);
      silent_ = {};
    } else if (errno != EINTR && (errno != EAGAIN || !wait(POLLOUT))) {
      return false;
    }
  }
  return true;
}

bool GrammarProcess::receive(std::string& payload) {
  const auto read = [&](char* to, std::size_t size) {
    while (size > 0) {
      const ssize_t some = recv(socket_, to, size, MSG_DONTWAIT);
      if (some > 0) {
        to += some;
        size -= static_cast<std::size_t>(some);
        silent_ = {};
      } else if (some == 0 || (errno != EINTR && (errno != EAGAIN || !wait(POLLIN)))) {
        return false;
      }
    }
    return true;
  };
  std::uint32_t length = 0;
  if (!read(reinterpret_cast<char*>(&length), sizeof(length)) || length == 0 || length > kLongestFrame) {
    return false;
  }
  note_progress();
  payload.resize(length);
  return read(payload.data(), length);
}

}  // namespace poise
