#include "common/process.h"

#include <fcntl.h>
#include <poll.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <thread>

#include "common/testing/failpoint.h"

namespace poise {
namespace {

constexpr auto kGrace = std::chrono::seconds(10);  // from the supervisor's death to ours by force
constexpr std::int64_t kSupervisorFollows = 30;    // seconds: it ends a run within these

std::atomic<bool> stop_flag{false};
std::atomic<bool> orphan_flag{false};
std::atomic<bool> hand_over_flag{false};
std::atomic<pid_t> only_from{0};           // 0: from anyone
std::atomic<std::int64_t> others_since{0};  // when another process first asked to stop, seconds; 0: none did
static_assert(std::atomic<bool>::is_always_lock_free);  // signal handlers write these
static_assert(std::atomic<std::int64_t>::is_always_lock_free);

std::int64_t now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);  // may be called by a signal handler
  return time.tv_sec;
}

void request_stop(int, siginfo_t* signal, void*) {
  const pid_t whom = only_from.load();
  if (whom == 0 || signal->si_pid == whom) {
    stop_flag.store(true);
  } else if (others_since.load() == 0) {
    others_since.store(now());
  }
}
void request_hand_over(int) { hand_over_flag.store(true); }

void end_here(int) {  // calls nothing that a signal handler may not
  constexpr char kWords[] = ": interrupted\n";
  const char* name = program_invocation_short_name;
  if (write(STDERR_FILENO, name, std::strlen(name)) >= 0) {
    (void)!write(STDERR_FILENO, kWords, sizeof kWords - 1);
  }
  _exit(static_cast<int>(Exit::interrupted));
}

void watch_supervisor(int descriptor) {
  pollfd end{.fd = descriptor, .events = POLLIN, .revents = 0};
  // The supervisor never writes: the pipe becomes readable only by its end of file.
  while (poll(&end, 1, -1) < 0 && errno == EINTR) {
  }
  orphan_flag.store(true);
  stop_flag.store(true);
  std::this_thread::sleep_for(kGrace);
  _exit(static_cast<int>(Exit::interrupted));
}

Exit report(const std::string& process, const char* sentence, Exit code) {
  spdlog::error("{}", sentence);
  std::fprintf(stderr, "%s: %s\n", process.c_str(), sentence);
  return code;
}

}  // namespace

void watch_signals(int death_descriptor, EndsFor whom) {
  only_from.store(death_descriptor >= 0 && whom == EndsFor::supervisor ? getppid() : 0);
  struct sigaction stop {};
  stop.sa_sigaction = request_stop;
  stop.sa_flags = SA_SIGINFO;
  sigaction(SIGTERM, &stop, nullptr);
  sigaction(SIGINT, &stop, nullptr);
  struct sigaction hand_over {};
  hand_over.sa_handler = request_hand_over;
  sigaction(SIGUSR1, &hand_over, nullptr);
  for (const int ignored : {SIGPIPE, SIGHUP, SIGXFSZ}) {
    std::signal(ignored, SIG_IGN);
  }
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  if (death_descriptor >= 0) {
    fcntl(death_descriptor, F_SETFD, FD_CLOEXEC);
    std::thread(watch_supervisor, death_descriptor).detach();
  }
}

void end_at_signals() {
  std::signal(SIGTERM, end_here);
  std::signal(SIGINT, end_here);
  sigset_t blocked;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGTERM);
  sigaddset(&blocked, SIGINT);
  pthread_sigmask(SIG_UNBLOCK, &blocked, nullptr);
}

bool stop_requested() {
  const std::int64_t since = others_since.load();
  return stop_flag.load() || (since != 0 && now() - since > kSupervisorFollows);
}
bool hand_over_requested() { return hand_over_flag.load(); }
bool orphaned() { return orphan_flag.load(); }

void open_log(const std::string& process, const std::string& path) {
  if (path.empty()) {
    spdlog::set_level(
        spdlog::level::off);  // stderr belongs to the one sentence a process ends with
    return;
  }
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (descriptor < 0) {
    fail("log file {} cannot be written: {}", path, std::generic_category().message(errno));
  }
  close(descriptor);
  auto logger = spdlog::basic_logger_mt(process, path);
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %n %l %v");
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(logger);
  spdlog::set_level(spdlog::level::info);
}

int run_main(const std::string& process, const std::function<Exit()>& body) {
  spdlog::set_level(spdlog::level::off);  // until a log is open: stdout is the user's
  Exit code = Exit::internal;
  try {
    arm_failpoints();
    code = body();
  } catch (const Failure& failure) {
    code = report(process, failure.what(), failure.code());
  } catch (const Defect& defect) {
    code = report(process, defect.what(), Exit::internal);
  } catch (const std::bad_alloc&) {
    code = report(process, "out of memory: use a smaller --host-memory or a smaller batch",
                  Exit::interrupted);
  } catch (const std::exception& problem) {
    code = report(process, problem.what(), Exit::internal);
  }
  spdlog::default_logger()->flush();
  return static_cast<int>(code);
}

}  // namespace poise
