#include "common/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>
#include <stop_token>
#include <thread>
#include <vector>

#include "common/trouble.h"

namespace poise {
namespace {

// A run id no other test uses; whatever is left under it goes at the end.
class SharedMemoryTest : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const char* what : {"control", "weights", "blocks-1"}) {
      unlink_segment(segment_name(run_, what));
    }
  }

  std::filesystem::path file(const std::string& name) const {
    return std::filesystem::path("/dev/shm") / name;
  }

  std::string run_ =
      fmt::format("5e67{:08x}{}", getpid(), ::testing::UnitTest::GetInstance()->random_seed());
};

// As the supervisor does it: a segment without attached processes loses its name, under an exclusive lock.
bool reaped(const std::filesystem::path& file) {
  const int descriptor = open(file.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    return false;
  }
  struct stat status {};
  const bool alone = flock(descriptor, LOCK_EX | LOCK_NB) == 0 && fstat(descriptor, &status) == 0 &&
                     status.st_nlink > 0;
  if (alone) {
    std::filesystem::remove(file);
  }
  close(descriptor);
  return alone;
}

TEST_F(SharedMemoryTest, ASegmentIsSeenByItsNameAndKeepsItsBytes) {
  const Segment made = Segment::create(segment_name(run_, "weights"), {8192});
  std::memcpy(made.data(), "poise", 5);
  const Segment seen = Segment::attach(made.name(), Access::read_only);
  EXPECT_EQ(seen.size(), Bytes{8192});
  EXPECT_EQ(std::memcmp(seen.data(), "poise", 5), 0);
}

TEST_F(SharedMemoryTest, OnlyThisUserMayOpenASegmentWhateverTheUmask) {
  const mode_t before = umask(0);
  const Segment made = Segment::create(segment_name(run_, "weights"), {4096});
  umask(before);
  struct stat status {};
  ASSERT_EQ(stat(file(made.name()).c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777u, 0600u);
}

TEST_F(SharedMemoryTest, ASegmentOthersMayReadIsRefused) {
  const Segment made = Segment::create(segment_name(run_, "weights"), {4096});
  ASSERT_EQ(chmod(file(made.name()).c_str(), 0644), 0);
  EXPECT_THROW(Segment::attach(made.name(), Access::read_only), Failure);
}

TEST_F(SharedMemoryTest, ATakenNameIsRefused) {
  const Segment made = Segment::create(segment_name(run_, "weights"), {4096});
  EXPECT_THROW(Segment::create(made.name(), {4096}), Failure);
}

TEST_F(SharedMemoryTest, MoreThanTheMachineHasIsRefusedWithNumbersAndLeavesNothing) {
  try {
    Segment::create(segment_name(run_, "weights"), kGiB * (1 << 20));
    FAIL() << "a pebibyte was reserved";
  } catch (const Failure& failure) {
    EXPECT_NE(std::string(failure.what()).find("1125899906842624 bytes"), std::string::npos)
        << failure.what();
  }
  EXPECT_FALSE(std::filesystem::exists(file(segment_name(run_, "weights"))));
}

TEST_F(SharedMemoryTest, ASegmentIsHeldByWhoMadeItAndByWhoAttached) {
  std::optional<Segment> made(Segment::create(segment_name(run_, "control"), {4096}));
  const std::filesystem::path segment = file(made->name());
  EXPECT_FALSE(reaped(segment));
  std::optional<Segment> attached(Segment::attach(made->name(), Access::read_only));
  made.reset();
  EXPECT_FALSE(reaped(segment));
  attached.reset();
  EXPECT_TRUE(reaped(segment));
}

TEST_F(SharedMemoryTest, AKilledProcessHoldsNothing) {
  const pid_t child = fork();
  if (child == 0) {
    const Segment weights = Segment::create(segment_name(run_, "weights"), {4096});
    raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(reaped(file(segment_name(run_, "weights"))));
}

TEST_F(SharedMemoryTest, WhoMakesASegmentWhileOthersReapHasOne) {
  const std::filesystem::path segment_file = file(segment_name(run_, "control"));
  std::vector<std::jthread> reapers;  // until their end
  for (int i = 0; i < 2; ++i) {
    reapers.emplace_back([&](const std::stop_token& over) {
      while (!over.stop_requested()) {
        reaped(segment_file);
      }
    });
  }
  const std::string name = segment_name(run_, "control");
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
  for (int made = 0; made < 100 || std::chrono::steady_clock::now() < until; ++made) {
    std::optional<Segment> segment;
    ASSERT_NO_THROW(segment.emplace(Segment::create(name, {4096}))) << "after " << made;
    ASSERT_TRUE(std::filesystem::exists(file(name))) << "after " << made;
    ASSERT_NO_THROW(Segment::attach(name, Access::read_only)) << "after " << made;
    unlink_segment(name);
  }
}

TEST_F(SharedMemoryTest, ALargeReservationIsSeenToGrow) {
  const std::string name = segment_name(run_, "weights");
  const Bytes size = kMiB * 513;
  std::vector<std::int64_t> seen;
  const Segment made = Segment::create(name, size, [&] {
    struct stat status {};
    EXPECT_EQ(stat(file(name).c_str(), &status), 0);
    EXPECT_EQ(status.st_size, size.n);
    seen.push_back(status.st_blocks * 512);
    return false;
  });
  ASSERT_EQ(std::ssize(seen), 17);
  for (std::int64_t step = 0; step < 17; ++step) {
    EXPECT_EQ(seen[static_cast<std::size_t>(step)], (kMiB * 32).n * step);
  }
}

TEST_F(SharedMemoryTest, AReservationThatIsGivenUpLeavesNothing) {
  const std::string name = segment_name(run_, "weights");
  int asked = 0;
  try {
    Segment::create(name, kMiB * 513, [&] { return ++asked == 2; });
    FAIL() << "it was made";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::interrupted);
  }
  EXPECT_EQ(asked, 2);
  EXPECT_FALSE(std::filesystem::exists(file(name)));
}

// Signals come often in a process with timers; some kernels give up a step for each.
TEST_F(SharedMemoryTest, SignalsDoNotEndAReservation) {
  struct sigaction before {
  }, handler{};
  handler.sa_handler = [](int) {};  // without SA_RESTART
  sigaction(SIGALRM, &handler, &before);
  const itimerval often{{0, 5000}, {0, 5000}}, never{};
  setitimer(ITIMER_REAL, &often, nullptr);
  EXPECT_NO_THROW(Segment::create(segment_name(run_, "weights"), kMiB * 1024));
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &before, nullptr);
}

TEST_F(SharedMemoryTest, ControlIsBelievedOnlyWithMagicVersionAndSize) {
  const Control made = Control::create(run_, 42);
  EXPECT_EQ(Control::attach(run_)->layout_hash, 42u);
  EXPECT_EQ(Control::attach(run_).run_id(), run_);

  made->abi_version = kAbiVersion + 1;
  EXPECT_THROW(Control::attach(run_), Failure);
  made->abi_version = kAbiVersion;
  made->control_bytes += 64;
  EXPECT_THROW(Control::attach(run_), Failure);
  made->control_bytes -= 64;
  made->magic = 0;
  EXPECT_THROW(Control::attach(run_), Failure);
  made->magic = kControlMagic;
  made->run_id[0] = 'x';
  EXPECT_THROW(Control::attach(run_), Failure);
}

TEST_F(SharedMemoryTest, ASegmentCutShortIsNoControlSegment) {
  const Segment made = Segment::create(segment_name(run_, "control"), {64});
  EXPECT_THROW(Control::attach(run_), Failure);
}

TEST_F(SharedMemoryTest, MovingASegmentMovesItsMapping) {
  Segment made = Segment::create(segment_name(run_, "weights"), {4096});
  made.data()[0] = std::byte{7};
  const Segment moved = std::move(made);
  EXPECT_EQ(moved.data()[0], std::byte{7});
}

TEST_F(SharedMemoryTest, ASegmentSaysHowMuchOfItCameInHugePages) {
  const std::uint64_t borders[] = {std::uint64_t{3} << 20};
  const Segment made = Segment::create(segment_name(run_, "weights"), kMiB * 7, nullptr, borders);
  // One before the border and one behind it, where the kernel gives them.
  EXPECT_LE(made.huge(), kMiB * 4);
  EXPECT_EQ(made.huge().n % (kMiB * 2).n, 0);
  EXPECT_EQ(Segment::attach(made.name(), Access::read_only).huge(), Bytes{0}) << "made by another";
}

TEST_F(SharedMemoryTest, ALargeSegmentIsMappedWhereHugePagesCanBe) {
  const auto place = [](const Segment& segment) {
    return reinterpret_cast<std::uintptr_t>(segment.data()) % (std::uintptr_t{2} << 20);
  };
  const std::string name = segment_name(run_, "weights");
  Segment made = Segment::create(name, kMiB * 5 + Bytes{4096});
  EXPECT_EQ(place(made), 0u);
  EXPECT_EQ(place(Segment::attach(name, Access::read_only)), 0u);
  made.data()[5] = std::byte{7};
  made.make_over(segment_name(run_, "blocks-1"), kMiB * 7);
  EXPECT_EQ(place(made), 0u);
  EXPECT_EQ(made.data()[5], std::byte{7});
}

// A part may begin and end within a huge page.
TEST_F(SharedMemoryTest, APartThatWasGivenBackIsZeroedAndItsNeighboursStay) {
  Segment made = Segment::create(segment_name(run_, "weights"), kMiB * 8);
  const auto blocks = [&] {
    struct stat status {};
    EXPECT_EQ(stat(file(made.name()).c_str(), &status), 0);
    return Bytes{status.st_blocks * 512};
  };
  EXPECT_EQ(blocks(), kMiB * 8);
  std::memset(made.data(), 7, static_cast<std::size_t>((kMiB * 8).n));
  const std::uint64_t first = (std::uint64_t{1} << 20) + 4096;
  made.give_back(first, kMiB * 5);
  EXPECT_LE(blocks(), kMiB * 6) << "at most the huge pages at its ends are kept";
  made.reserve_again(first, kMiB * 5);
  EXPECT_EQ(blocks(), kMiB * 8);
  const std::string all(reinterpret_cast<const char*>(made.data()), static_cast<std::size_t>((kMiB * 8).n));
  const std::uint64_t last = first + (std::uint64_t{5} << 20);
  EXPECT_EQ(all.find_first_not_of('\7'), first);
  EXPECT_EQ(all.find_first_not_of('\0', first), last);
  EXPECT_EQ(all.find_first_not_of('\7', last), std::string::npos);
}

// Pages that another process, or a device, has pinned cannot be taken apart.
TEST_F(SharedMemoryTest, WhatLiesBetweenBordersComesBackWholeThoughItsNeighboursArePinned) {
  const std::uint64_t first = (std::uint64_t{3} << 20) + 4096, last = (std::uint64_t{9} << 20) - 4096;
  const std::uint64_t borders[] = {first, last};
  Segment made = Segment::create(segment_name(run_, "weights"), kMiB * 12, nullptr, borders);
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  iovec pinned[] = {{made.data() + first - 4096, 4096}, {made.data() + last, 4096}};
  ASSERT_EQ(vmsplice(pipes[1], pinned, 2, 0), 8192);  // the pipe holds the pages themselves
  const auto blocks = [&] {
    struct stat status {};
    EXPECT_EQ(stat(file(made.name()).c_str(), &status), 0);
    return Bytes{status.st_blocks * 512};
  };
  const Bytes bytes{static_cast<std::int64_t>(last - first)};
  made.give_back(first, bytes);
  EXPECT_EQ(blocks(), kMiB * 12 - bytes);
  close(pipes[0]);
  close(pipes[1]);
}

TEST(HostMemory, SomeIsAvailable) { EXPECT_GT(available_host_memory(), kMiB); }

// Found by tests/fuzz/control_fuzz.cpp.
TEST_F(SharedMemoryTest, ARunIdThatIsNoTextIsToldInOneLine) {
  const Control control = Control::create(run_, 1);
  std::strcpy(control->run_id, "a\n\x1b\xff");
  try {
    Control::attach(run_);
    FAIL() << "it was attached to";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::foreign);
    EXPECT_NE(std::string(failure.what()).find(R"(belongs to run a\x0a\x1b\xff)"),
              std::string::npos)
        << failure.what();
  }
}

}  // namespace
}  // namespace poise
