#include "common/testing/failpoint.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <set>
#include <string>

#include "common/trouble.h"

namespace poise {
namespace {

using FaultKind = Fault::Kind;

class FailpointTest : public ::testing::Test {
 protected:
  void TearDown() override { arm_failpoints("", ""); }
};

std::string refusal_of(const std::string& words) {
  try {
    arm_failpoints(words, "");
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "";
}

// The signal that ends a process which reaches the point; 0 where it lives on.
int signal_of(const char* words) {
  const pid_t child = fork();
  if (child == 0) {
    arm_failpoints(words, "");
    failpoint("results.written");
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, WUNTRACED);
  if (WIFSTOPPED(status)) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    return WSTOPSIG(status);
  }
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

TEST_F(FailpointTest, NothingHappensUnlessItIsAskedFor) {
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(failpoint("results.written").kind, FaultKind::none);
    EXPECT_FALSE(fails_at("results.sync"));
  }
  EXPECT_EQ(signal_of(""), 0);
}

TEST_F(FailpointTest, AProcessDiesOrHaltsAtThePoint) {
  EXPECT_EQ(signal_of("results.written:kill"), SIGKILL);
  EXPECT_EQ(signal_of("results.written:stop"), SIGSTOP);
  EXPECT_EQ(signal_of("results.written:abort"), SIGABRT);
  EXPECT_EQ(signal_of("results.written:kill@2"), 0);
}

TEST_F(FailpointTest, ADelayedCallSucceedsLater) {
  arm_failpoints("results.sync:delay=30@2", "");
  EXPECT_FALSE(fails_at("results.sync"));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(fails_at("results.sync"));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(30));
}

TEST_F(FailpointTest, ATokenIsNamedByItsNumber) {
  arm_failpoints("executor.tokens:dies_of=17+", "");
  const Fault fault = failpoint("executor.tokens");
  EXPECT_EQ(fault.kind, FaultKind::dies_of);
  EXPECT_EQ(fault.value, 17);
  EXPECT_THROW(arm_failpoints("executor.tokens:dies_of=x", ""), Failure);
  EXPECT_THROW(arm_failpoints("results.sync:hangs_of=3", ""), Failure);
}

TEST_F(FailpointTest, ACallFailsTheNthTimeAlone) {
  arm_failpoints("results.sync:errno=EIO@2", "");
  EXPECT_FALSE(fails_at("results.sync"));
  EXPECT_FALSE(fails_at("replace_file.sync"));
  errno = 0;
  EXPECT_TRUE(fails_at("results.sync"));
  EXPECT_EQ(errno, EIO);
  EXPECT_FALSE(fails_at("results.sync"));
}

TEST_F(FailpointTest, WithAPlusEveryLaterCallFailsToo) {
  arm_failpoints("results.sync:errno=28@2+", "");
  EXPECT_FALSE(fails_at("results.sync"));
  EXPECT_TRUE(fails_at("results.sync"));
  EXPECT_TRUE(fails_at("results.sync"));
  EXPECT_EQ(errno, ENOSPC);
}

TEST_F(FailpointTest, AWriteTakesAPartOrNothing) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  arm_failpoints("order_log.write:short=3,order_log.write:errno=ENOSPC@2", "");
  EXPECT_EQ(write_at("order_log.write", ends[1], "abcdef", 6), 3);
  EXPECT_EQ(write_at("order_log.write", ends[1], "def", 3), -1);
  EXPECT_EQ(errno, ENOSPC);
  EXPECT_EQ(write_at("order_log.write", ends[1], "def", 3), 3);
  char got[8];
  EXPECT_EQ(read(ends[0], got, sizeof got), 6);
  EXPECT_EQ(std::string(got, 6), "abcdef");
  close(ends[0]);
  close(ends[1]);
}

TEST_F(FailpointTest, AnEntryOfAnotherProgramIsNotThisOnes) {
  arm_failpoints("planner/results.sync:errno=EIO,supervisor.steady:kill", "");
  EXPECT_FALSE(fails_at("results.sync"));
}

TEST_F(FailpointTest, WithAFolderOfNotesAnEntryFiresInOneProcessAlone) {
  std::string folder = "/tmp/poise-failpoints-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  arm_failpoints("results.open:errno=EIO,results.sync:errno=EIO", folder);
  EXPECT_TRUE(fails_at("results.sync"));
  EXPECT_TRUE(std::filesystem::exists(folder + "/1"));
  EXPECT_FALSE(std::filesystem::exists(folder + "/0"));
  arm_failpoints("results.open:errno=EIO,results.sync:errno=EIO", folder);  // as a successor does
  EXPECT_FALSE(fails_at("results.sync"));
  EXPECT_TRUE(fails_at("results.open"));
  std::filesystem::remove_all(folder);
}

TEST_F(FailpointTest, WhatDoesNotExistIsRefused) {
  EXPECT_NE(refusal_of("nowhere:kill").find("names no failpoint"), std::string::npos);
  for (const char* words : {"results.sync", "results.sync:", "results.sync:explode",
                            "results.sync:short=3", "results.write:short=0", "results.sync:errno=",
                            "results.sync:errno=ENOTHING", "channel.receive:reorder",
                            "device.allocate:errno=EIO", "loader.started:fail"}) {
    EXPECT_NE(refusal_of(words).find("names no action"), std::string::npos) << words;
  }
  for (const char* words : {"results.sync:kill@", "results.sync:kill@0", "results.sync:kill@x"}) {
    EXPECT_NE(refusal_of(words).find("no time to fire"), std::string::npos) << words;
  }
  EXPECT_EQ(refusal_of("results.sync:kill@3"), "");
}

TEST_F(FailpointTest, NamesOfPointsDiffer) {
  std::set<std::string_view> names;
  for (const PointEntry& entry : kFailpoints) {
    EXPECT_TRUE(names.insert(entry.name).second) << entry.name;
  }
}

}  // namespace
}  // namespace poise
