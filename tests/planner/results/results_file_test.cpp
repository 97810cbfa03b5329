#include "planner/results/results_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <random>

#include "planner/results/result_line.h"
#include "planner/results/results_directory.h"
#include "tests/planner/requests/request_support.h"

namespace poise {
namespace {

using ::testing::HasSubstr;
using testing_support::complaint;
using testing_support::content_of;
using testing_support::ScratchDirectory;

std::vector<RequestId> lines_up_to(std::uint32_t last) {
  std::vector<RequestId> lines;
  for (std::uint32_t n = 1; n <= last; ++n) {
    lines.push_back({n});
  }
  return lines;
}

std::string answer_for(RequestId line, std::string_view text = "x") {
  return answered_line(line, fmt::format("id {}", line.n),
                       fmt::format("{{\"text\":\"{}\"}}", text));
}
std::string error_for(RequestId line) {
  return error_line({line, std::nullopt, "wrong", "prompt", "invalid_value"});
}

// Runs `body` in a child of its own, where limits and signals do not reach the other tests; its
// exit status. What the child finds out it says with its exit code.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 99;
    try {
      code = body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    ::_exit(code);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

TEST(ResultsFile, LinesStandInTheOrderTheyCameAndAreDoneOnResume) {
  const ScratchDirectory run;
  std::string expected;
  {
    ResultsFile file = ResultsFile::create(run.path());
    for (const RequestId line : {RequestId{3}, RequestId{1}}) {
      file.append(line, false, answer_for(line), {0});
      expected += answer_for(line) + "\n";
    }
    file.append({7}, true, error_for({7}), {0});
    expected += error_for({7}) + "\n";
    EXPECT_EQ(content_of(file.path()), expected) << "each line is written at once";
    file.sync();
  }
  ResultsFile file = ResultsFile::resume(run.path(), lines_up_to(8));
  EXPECT_EQ(file.counts().answers, 2u);
  EXPECT_EQ(file.counts().errors, 1u);
  EXPECT_EQ(file.cut_off(), Bytes{0});
  for (std::uint32_t n = 1; n <= 8; ++n) {
    EXPECT_EQ(file.is_done({n}), n == 1 || n == 3 || n == 7) << n;
  }
  file.append({2}, false, answer_for({2}), {0});
  EXPECT_EQ(content_of(file.path()), expected + answer_for({2}) + "\n");
}

TEST(ResultsFile, ASecondOneIsNotMadeOverTheFirst) {
  const ScratchDirectory run;
  ResultsFile::create(run.path()).append({1}, false, answer_for({1}), {0});
  EXPECT_EQ(complaint([&] { ResultsFile::create(run.path()); }).code, Exit::busy);
  EXPECT_EQ(content_of(run / kPartialName), answer_for({1}) + "\n");
}

TEST(ResultsFile, ATailCutAtAnyByteCostsThatLineOnly) {
  const std::string first = answer_for({1}) + "\n", second = answer_for({2}, "é😀") + "\n",
                    third = error_for({3}) + "\n";
  const std::string whole = first + second + third;
  for (std::size_t cut = 0; cut <= whole.size(); ++cut) {
    const ScratchDirectory run;
    run.write(kPartialName, whole.substr(0, cut));
    ResultsFile file = ResultsFile::resume(run.path(), lines_up_to(3));
    const std::size_t lines =
        (cut >= first.size()) + (cut >= first.size() + second.size()) + (cut == whole.size());
    const std::string kept = (first + second + third)
                                 .substr(0, lines == 0   ? 0
                                            : lines == 1 ? first.size()
                                            : lines == 2 ? first.size() + second.size()
                                                         : whole.size());
    EXPECT_EQ(file.counts().lines(), lines) << cut;
    EXPECT_EQ(file.cut_off().n, static_cast<std::int64_t>(cut - kept.size())) << cut;
    EXPECT_EQ(content_of(file.path()), kept) << cut;
    for (std::uint32_t n = 1; n <= 3; ++n) {
      if (!file.is_done({n})) {
        file.append({n}, n == 3,
                    n == 1   ? answer_for({1})
                    : n == 2 ? answer_for({2}, "é😀")
                             : error_for({3}),
                    {0});
      }
    }
    EXPECT_EQ(content_of(file.path()), whole) << cut;
  }
}

TEST(ResultsFile, ATailOfZerosIsCutOff) {
  const ScratchDirectory run;
  run.write(kPartialName, answer_for({1}) + "\n" + std::string(5000, '\0'));
  ResultsFile file = ResultsFile::resume(run.path(), lines_up_to(2));
  EXPECT_EQ(file.counts().lines(), 1u);
  EXPECT_EQ(file.cut_off(), Bytes{5000});
}

TEST(ResultsFile, ZerosOfAPowerFailureAreCutOffWithWhatCameAfterThem) {
  // Blocks of 16 bytes, any of which may not have reached the disk.
  std::string durable = answer_for({1}) + "\n", whole = durable;
  for (std::uint32_t n = 2; n <= 5; ++n) {
    whole += answer_for({n}) + "\n";
  }
  for (std::size_t at = durable.size(); at + 16 < whole.size(); at += 16) {
    const ScratchDirectory run;
    run.write(kPartialName, std::string(whole).replace(at, 16, 16, '\0'));
    ResultsFile file = ResultsFile::resume(run.path(), lines_up_to(5));
    const std::string kept = content_of(file.path());
    EXPECT_TRUE(whole.starts_with(kept) && kept.size() >= durable.size() && kept.size() <= at)
        << at;
    EXPECT_EQ(kept.back(), '\n') << at;
    EXPECT_EQ(file.cut_off().n, static_cast<std::int64_t>(whole.size() - kept.size())) << at;
    for (std::uint32_t n = 1; n <= 5; ++n) {
      if (!file.is_done({n})) {
        file.append({n}, false, answer_for({n}), {0});
      }
    }
    EXPECT_EQ(content_of(file.path()), whole) << at;
  }
}

TEST(ResultsFile, ZerosBeforeWhatWasDurableAreRefused) {
  const ScratchDirectory run;
  std::string content = answer_for({1}) + "\n" + std::string(16, '\0') + "\n";
  for (std::uint32_t n = 2; n <= 300; ++n) {
    content += answer_for({n}) + "\n";
  }
  run.write(kPartialName, content);
  const auto said = complaint([&] { ResultsFile::resume(run.path(), lines_up_to(300)); });
  EXPECT_THAT(said.sentence, HasSubstr(", line 2: zeros instead of a result; delete that line"));
  EXPECT_EQ(content_of(run / kPartialName), content);
}

TEST(ResultsFile, LongLinesAreReadBack) {
  const ScratchDirectory run;
  const std::string text(3 << 20, 'x');
  run.write(kPartialName, answer_for({1}, text) + "\n" + answer_for({2}, text) + "\n{\"id");
  const ResultsFile file = ResultsFile::resume(run.path(), lines_up_to(2));
  EXPECT_EQ(file.counts().lines(), 2u);
  EXPECT_EQ(file.cut_off(), Bytes{4});
}

TEST(ResultsFile, WhatElseStandsInItIsRefusedAndLeftAlone) {
  struct Row {
    std::string line;
    const char* says;
  };
  for (const Row& row : std::vector<Row>{{"nonsense", "not a result"},
                                         {"", "not a result"},
                                         {"{}", "not a result"},
                                         {answer_for({1}), "second result for line 1"},
                                         {answer_for({9}), "line 9, which the input does not have"},
                                         {answer_for({2}).substr(0, 40), "not a result"}}) {
    const ScratchDirectory run;
    const std::string content = answer_for({1}) + "\n" + row.line + "\n" + answer_for({3}) + "\n";
    run.write(kPartialName, content);
    const auto said = complaint([&] { ResultsFile::resume(run.path(), lines_up_to(3)); });
    EXPECT_THAT(said.sentence, HasSubstr(", line 2: ")) << row.line;
    EXPECT_THAT(said.sentence, HasSubstr(row.says)) << row.line;
    EXPECT_EQ(content_of(run / kPartialName), content);
  }
}

TEST(ResultsFile, OnlyARegularFileIsContinued) {
  const ScratchDirectory run;
  ASSERT_EQ(::mkfifo((run / kPartialName).c_str(), 0600), 0);
  EXPECT_EQ(complaint([&] { ResultsFile::resume(run.path(), {}); }).code, Exit::busy);
  const ScratchDirectory other;
  other.write("elsewhere", "");
  std::filesystem::create_symlink("elsewhere", other / kPartialName);
  EXPECT_EQ(complaint([&] { ResultsFile::resume(other.path(), {}); }).code, Exit::busy);
}

TEST(ResultsFile, LinesAreTakenBackForGoodToWhereTheyStood) {
  const ScratchDirectory directory;
  {
    ResultsFile file = ResultsFile::create(directory.path());
    file.append({1}, false, answer_for({1}), {0});
    const Bytes one = file.size();
    file.append({2}, false, answer_for({2}), {0});
    file.take_back(one);
    EXPECT_EQ(complaint([&] { file.sync(); }).code, Exit::busy);
  }
  const ResultsFile again = ResultsFile::resume(directory.path(), lines_up_to(3));
  EXPECT_EQ(again.counts().lines(), 1u);
  EXPECT_TRUE(again.is_done({1}) && !again.is_done({2}));
}

TEST(ResultsFile, AnInputLineHasOneResult) {
  const ScratchDirectory run;
  ResultsFile file = ResultsFile::create(run.path());
  file.append({5}, false, answer_for({5}), {0});
  EXPECT_THROW(file.append({5}, false, answer_for({5}), {0}), Defect);
  EXPECT_THROW(file.append({6}, false, "two\nlines", {0}), Defect);
}

// Under a limit on the file's size, as on a full disk: a write comes short, the next one fails.
TEST(ResultsFile, AFullDiskIsSaidAndLeavesNoHalfLine) {
  const ScratchDirectory run;
  const std::string line = answer_for({1}, std::string(100, 'x')) + "\n";
  const int status = in_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{line.size() + line.size() / 2, RLIM_INFINITY};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ResultsFile file = ResultsFile::create(run.path());
    file.append({1}, false, line.substr(0, line.size() - 1), {0});
    const auto said =
        complaint([&] { file.append({2}, false, answer_for({2}, std::string(100, 'y')), {0}); });
    if (said.code != Exit::busy || said.sentence.find("--resume") == std::string::npos) {
      return 1;
    }
    if (content_of(file.path()) != line || file.kept() == Bytes{0} || !file.is_done({2})) {
      return 2;
    }
    if (complaint([&] { file.sync(); }).code != Exit::busy || content_of(file.path()) != line) {
      return 3;
    }
    const rlimit none{RLIM_INFINITY, RLIM_INFINITY};
    ::setrlimit(RLIMIT_FSIZE, &none);
    file.sync();  // the disk has room again: nothing computed is lost
    return file.kept() == Bytes{0} &&
                   content_of(file.path()) == line + answer_for({2}, std::string(100, 'y')) + "\n"
               ? 0
               : 4;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(ResultsFile::resume(run.path(), lines_up_to(2)).counts().lines(), 2u);
}

TEST(ResultsFile, WhatIsKeptOfAFullDiskIsBounded) {
  const ScratchDirectory run;
  const int status = in_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1, RLIM_INFINITY};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ResultsFile file = ResultsFile::create(run.path());
    const std::string big(8 << 20, 'x');
    std::uint32_t n = 0;
    while (n < 100) {
      ++n;
      if (complaint([&] { file.append({n}, false, answer_for({n}, big), {0}); }).code !=
          Exit::busy) {
        return 1;
      }
      if (!file.is_done({n})) {
        break;
      }
    }
    return n < 100 && file.kept() >= kMiB * 64 && file.kept() < kMiB * 80 ? 0 : 2;
  });
  EXPECT_EQ(status, 0);
}

TEST(ResultsFile, BeingDeletedMovedOrChangedIsNoticedAtTheNextGroup) {
  const auto noticed = [](const std::function<void(const std::filesystem::path&)>& meddle) {
    const ScratchDirectory run;
    ResultsFile file = ResultsFile::create(run.path());
    file.append({1}, false, answer_for({1}), {0});
    file.sync();
    meddle(file.path());
    file.append({2}, false, answer_for({2}), {10});
    return complaint([&] { file.tick({20}); });
  };
  const auto deleted = noticed([](const auto& path) { std::filesystem::remove(path); });
  EXPECT_EQ(deleted.code, Exit::busy);
  EXPECT_THAT(deleted.sentence, HasSubstr("was deleted"));
  const auto moved = noticed(
      [](const auto& path) { std::filesystem::rename(path, path.string() + ".elsewhere"); });
  EXPECT_THAT(moved.sentence, HasSubstr("moved or replaced"));
  const auto changed =
      noticed([](const auto& path) { std::ofstream(path, std::ios::app) << "more\n"; });
  EXPECT_THAT(changed.sentence, HasSubstr("changed"));
  EXPECT_EQ(noticed([](const auto&) {}).code, Exit::done);
}

TEST(ResultsFile, GroupsAreMadeDurableByCountAndByTime) {
  const ScratchDirectory run;
  ResultsFile file = ResultsFile::create(run.path());
  // Where the file is not in its place, the next group fails: so one was due, or was not.
  const auto put_aside = [&] {
    const auto aside = run / "aside";
    std::filesystem::rename(file.path(), aside);
    return aside;
  };
  for (std::uint32_t n = 1; n < 256; ++n) {
    file.append({n}, false, answer_for({n}), {0.5});
  }
  const auto aside = put_aside();
  file.tick({1.4});  // not yet a second
  EXPECT_EQ(complaint([&] { file.append({256}, false, answer_for({256}), {0.5}); }).code,
            Exit::busy)
      << "256 lines are a group";
  std::filesystem::rename(aside, file.path());
  file.sync();
  file.append({257}, false, answer_for({257}), {2});
  put_aside();
  file.tick({2.9});
  EXPECT_EQ(complaint([&] { file.tick({3.0}); }).code, Exit::busy) << "a second is over";
}

// A writer that is killed at any moment: what was written before is there, whole, once.
TEST(ResultsFile, AWriterKilledAtAnyMomentLosesNoWholeLine) {
  const auto seed = static_cast<unsigned>(::testing::UnitTest::GetInstance()->random_seed());
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937 random(seed);
  const ScratchDirectory run;
  constexpr std::uint32_t kLines = 3000;
  const std::string text(3000, 'x');
  ResultsFile::create(run.path());
  for (int kills = 0; kills < 12; ++kills) {
    int pipe[2];
    ASSERT_EQ(::pipe(pipe), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      ResultsFile file = ResultsFile::resume(run.path(), lines_up_to(kLines));
      for (std::uint32_t n = 1; n <= kLines; ++n) {
        if (!file.is_done({n})) {
          file.append({n}, false, answer_for({n}, text), {0});
          if (::write(pipe[1], &n, sizeof n) != sizeof n) {
            ::_exit(1);
          }
        }
      }
      ::_exit(0);  // the reader sees the end, however far behind it was
    }
    ::close(pipe[1]);
    std::vector<std::uint32_t> told;
    const std::uint32_t enough = 1 + random() % 100;
    std::uint32_t n = 0;
    while (told.size() < enough && ::read(pipe[0], &n, sizeof n) == sizeof n) {
      told.push_back(n);
    }
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    while (::read(pipe[0], &n, sizeof n) == sizeof n) {
      told.push_back(n);
    }
    ::close(pipe[0]);
    const ResultsFile file = ResultsFile::resume(run.path(), lines_up_to(kLines));
    for (const std::uint32_t line : told) {
      EXPECT_TRUE(file.is_done({line})) << line;
    }
    if (file.counts().lines() == kLines) {  // a writer far ahead of its reader: begin again
      std::filesystem::remove(file.path());
      ResultsFile::create(run.path());
    }
  }
}

}  // namespace
}  // namespace poise
