#include "common/process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace poise {
namespace {

// Runs `body` in a child process; the way it ended.
template <typename Body>
int in_child(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
}

bool soon(bool (*condition)()) {
  for (int i = 0; i < 2000 && !condition(); ++i) {
    usleep(1000);
  }
  return condition();
}

TEST(ProcessTest, TermAndInterruptAskToStop) {
  for (const int signal : {SIGTERM, SIGINT}) {
    EXPECT_EQ(in_child([signal] {
                watch_signals(-1);
                if (stop_requested()) {
                  return 1;
                }
                raise(signal);
                return stop_requested() && !orphaned() ? 0 : 2;
              }),
              0);
  }
}

TEST(ProcessTest, AProcessThatPrintsEndsAtSignalsThatCameBeforeItListenedToo) {
  for (const int signal : {SIGTERM, SIGINT}) {
    for (const bool before : {true, false}) {
      EXPECT_EQ(in_child([=] {
                  sigset_t all;
                  sigfillset(&all);
                  sigprocmask(SIG_BLOCK, &all, nullptr);
                  if (before) {
                    raise(signal);
                  }
                  end_at_signals();
                  if (!before) {
                    raise(signal);
                  }
                  return 0;
                }),
                static_cast<int>(Exit::interrupted));
    }
  }
}

TEST(ProcessTest, HangUpPipeAndFileSizeSignalsDoNotEndAProcess) {
  EXPECT_EQ(in_child([] {
              watch_signals(-1);
              raise(SIGHUP);
              raise(SIGPIPE);
              raise(SIGXFSZ);
              return stop_requested() ? 1 : 0;
            }),
            0);
}

TEST(ProcessTest, TheEndOfTheSupervisorAsksToStop) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  EXPECT_EQ(in_child([&] {
              close(ends[1]);
              watch_signals(ends[0]);
              return soon(stop_requested) && orphaned() ? 0 : 1;
            }),
            1)
      << "the write end is still open here";
  close(ends[1]);
  EXPECT_EQ(in_child([&] {
              watch_signals(ends[0]);
              return soon(stop_requested) && orphaned() ? 0 : 1;
            }),
            0);
  close(ends[0]);
}

// A service manager signals all processes of a run at once; the supervisor then says who ends when.
TEST(ProcessTest, ALoaderOrExecutorEndsWhenItsSupervisorSaysSo) {
  int ends[2], ready[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    watch_signals(ends[0], EndsFor::supervisor);
    raise(SIGTERM);
    const bool early = stop_requested();
    static_cast<void>(write(ready[1], "r", 1));
    _exit(!early && soon(stop_requested) && !orphaned() ? 0 : 1);
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  kill(child, SIGTERM);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  for (const int end : {ends[0], ends[1], ready[0], ready[1]}) {
    close(end);
  }
  EXPECT_EQ(in_child([] {
              watch_signals(-1, EndsFor::supervisor);  // without a supervisor
              raise(SIGTERM);
              return stop_requested() ? 0 : 1;
            }),
            0);
}

TEST(ProcessTest, WhatIsThrownBecomesOneLineAndACode) {
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_main("poise-test", []() -> Exit { fail(Exit::busy, "disk {} is full", 7); }), 73);
  EXPECT_EQ(run_main("poise-test", []() -> Exit { throw std::bad_alloc(); }), 75);
  EXPECT_EQ(run_main("poise-test", []() -> Exit { return Exit::done; }), 0);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "poise-test: disk 7 is full\n"
            "poise-test: out of memory: use a smaller --host-memory or a smaller batch\n");
}

TEST(ProcessTest, ABrokenInvariantIsOurFaultAndSaysSo) {
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_main("poise-test",
                     []() -> Exit {
                       check(false, "blocks are never shared");
                       return Exit::done;
                     }),
            70);
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("blocks are never shared"),
            std::string::npos);
}

TEST(ProcessTest, ALogIsReadableByThisUserAlone) {
  const auto path = std::filesystem::temp_directory_path() / fmt::format("poise-log-{}", getpid());
  EXPECT_EQ(in_child([&] {
              return run_main("poise-test", [&]() -> Exit {
                open_log("poise-test", path);
                fail("no such thing");
              });
            }),
            2);
  struct stat status {};
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777u, 0600u);
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_NE(text.find("no such thing"), std::string::npos);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace poise
