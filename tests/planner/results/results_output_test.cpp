#include "planner/results/results_output.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <set>
#include <utility>

#include "planner/results/manifest.h"
#include "planner/results/result_line.h"
#include "planner/results/results_directory.h"
#include "planner/results/results_start.h"
#include "tests/planner/requests/request_support.h"

namespace poise {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing_support::complaint;
using testing_support::content_of;
using testing_support::ScratchDirectory;

const std::vector<RequestId> kLines{{1}, {2}};
const Manifest kManifest{"build", "input", "model", {{"--dtype", "float32"}}};

// A run of two lines, both done.
ResultsFile finished_run(const fs::path& run_dir) {
  ResultsFile file = ResultsFile::create(run_dir);
  file.append({2}, false, answered_line({2}, "b", "{}"), {0});
  file.append({1}, true, error_line({{1}, "a", "m", "", "c"}), {0});
  return file;
}
std::string expected() {
  return answered_line({2}, "b", "{}") + "\n" + error_line({{1}, "a", "m", "", "c"}) + "\n";
}

std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) {
    names.push_back(entry.path().filename());
  }
  std::ranges::sort(names);
  return names;
}

dev_t device_of(const fs::path& path) {
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0);
  return status.st_dev;
}

TEST(ResultsOutput, AppearsWholeAndLeavesTheRunFinished) {
  const ScratchDirectory work;
  fs::create_directory(work / "run");
  publish(finished_run(work / "run"), work / "run", work / "out.jsonl", false, kLines);
  EXPECT_EQ(content_of(work / "out.jsonl"), expected());
  EXPECT_EQ(run_state(work / "run"), RunState::finished);
  EXPECT_EQ(read_publication(work / "run")->output, work / "out.jsonl");
  EXPECT_EQ(names_in(work / "run"), std::vector<std::string>{kPublishedName});
}

TEST(ResultsOutput, ComesAsACopyFromAnotherFileSystem) {
  const ScratchDirectory run("/dev/shm"), work;
  ASSERT_NE(device_of(run.path()), device_of(work.path())) << "needs two file systems";
  publish(finished_run(run.path()), run.path(), work / "out.jsonl", false, kLines);
  EXPECT_EQ(content_of(work / "out.jsonl"), expected());
  EXPECT_EQ(names_in(work.path()), std::vector<std::string>{"out.jsonl"});
  EXPECT_EQ(run_state(run.path()), RunState::finished);
}

TEST(ResultsOutput, ACopyThatWasPublishedBeforeACrashIsTheEnd) {
  const ScratchDirectory work;
  fs::create_directory(work / "run");
  {
    ResultsFile file = finished_run(work / "run");
    write_publication(work / "run", {work / "out.jsonl", Bytes{1}});
  }
  EXPECT_EQ(run_state(work / "run"), RunState::unfinished) << "noted, not yet there";
  work.write("out.jsonl", expected() + "foreign\n");
  EXPECT_EQ(run_state(work / "run"), RunState::unfinished) << "somebody else's";
  work.write("out.jsonl", expected());
  EXPECT_EQ(run_state(work / "run"), RunState::finished);
  EXPECT_FALSE(fs::exists(work / "run" / kPartialName));
}

TEST(ResultsOutput, AFileOfAnotherOriginIsReplacedOnlyIfToldTo) {
  for (const bool across : {false, true}) {
    const ScratchDirectory run(across ? fs::path("/dev/shm") : fs::temp_directory_path()), work;
    work.write("out.jsonl", "precious");
    const auto said = complaint(
        [&] { publish(finished_run(run.path()), run.path(), work / "out.jsonl", false, kLines); });
    EXPECT_EQ(said.code, Exit::busy);
    EXPECT_THAT(said.sentence, HasSubstr("--overwrite"));
    EXPECT_EQ(content_of(work / "out.jsonl"), "precious");
    EXPECT_EQ(run_state(run.path()), RunState::unfinished);
    publish(ResultsFile::resume(run.path(), kLines), run.path(), work / "out.jsonl", true, kLines);
    EXPECT_EQ(content_of(work / "out.jsonl"), expected());
    EXPECT_EQ(run_state(run.path()), RunState::finished);
  }
}

TEST(ResultsOutput, AnOutputThatCannotBeWrittenKeepsTheResults) {
  const ScratchDirectory work;
  for (const fs::path& output : {work / "no" / "out.jsonl", work.path()}) {
    ScratchDirectory fresh("/dev/shm");
    EXPECT_EQ(complaint([&] {
                publish(finished_run(fresh.path()), fresh.path(), output, true, kLines);
              }).code,
              Exit::busy);
    EXPECT_EQ(ResultsFile::resume(fresh.path(), kLines).counts().lines(), 2u);
  }
  EXPECT_EQ(names_in(work.path()), std::vector<std::string>{});
}

TEST(ResultsOutput, AFullDiskLeavesNoHalfCopy) {
  const ScratchDirectory run("/dev/shm"), work;
  ASSERT_NE(device_of(run.path()), device_of(work.path()));
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    ResultsFile file = finished_run(run.path());
    const rlimit limit{expected().size() / 2, RLIM_INFINITY};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const auto said =
        complaint([&] { publish(std::move(file), run.path(), work / "out.jsonl", false, kLines); });
    ::_exit(said.code == Exit::busy ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(names_in(work.path()), std::vector<std::string>{});
  EXPECT_EQ(ResultsFile::resume(run.path(), kLines).counts().lines(), 2u);
}

TEST(ResultsOutput, IncompleteResultsAreNotPublished) {
  const ScratchDirectory work;
  ResultsFile file = ResultsFile::create(work.path());
  file.append({1}, false, answered_line({1}, "a", "{}"), {0});
  EXPECT_THROW(publish(std::move(file), work.path(), work / "out", false, kLines), Defect);
  EXPECT_FALSE(fs::exists(work / "out"));
}

TEST(ResultsOutput, AnEmptyInputGivesAnEmptyOutput) {
  const ScratchDirectory work;
  fs::create_directory(work / "run");
  publish(ResultsFile::create(work / "run"), work / "run", work / "out", false, {});
  EXPECT_TRUE(fs::exists(work / "out"));
  EXPECT_EQ(fs::file_size(work / "out"), 0u);
}

TEST(ResultsOutput, WhereItGoesIsLookedAtBeforehand) {
  const ScratchDirectory work;
  const fs::path input = work.write("in.jsonl", "x"), there = work.write("there", "precious");
  fs::create_hard_link(input, work / "linked");
  fs::create_symlink("in.jsonl", work / "pointed");
  fs::create_symlink("nowhere", work / "dangling");
  ASSERT_EQ(::mkfifo((work / "pipe").c_str(), 0600), 0);
  const auto code = [&](const fs::path& output, bool overwrite) {
    return complaint([&] { check_output(output, input, overwrite); }).code;
  };
  EXPECT_EQ(code(work / "new", false), Exit::done);
  EXPECT_EQ(code(there, true), Exit::done);
  EXPECT_EQ(code(there, false), Exit::cannot_start);
  EXPECT_EQ(code(work / "dangling", false), Exit::cannot_start);
  for (const fs::path& output :
       {input, work / "linked", work / "pointed", work.path() / "." / "in.jsonl", work.path(),
        work.path() / "", work.path() / ".", work / "pipe", fs::path("/dev/null"), fs::path(""),
        work / "no" / "out", there / "out"}) {
    EXPECT_EQ(code(output, true), Exit::cannot_start) << output;
  }
  EXPECT_EQ(content_of(input), "x");
  EXPECT_EQ(content_of(there), "precious");
}

TEST(ResultsOutput, WithoutPermissionNothingIsBegun) {
  const ScratchDirectory work;
  const fs::path input = work.write("in.jsonl", "x");
  fs::permissions(work.path(), fs::perms::owner_read | fs::perms::owner_exec |
                                   fs::perms::others_read | fs::perms::others_exec);
  const pid_t child = ::fork();
  if (child == 0) {
    // Root may write everywhere: if this is root, act as the user `nobody`.
    if (::geteuid() == 0 && ::setreuid(65534, 65534) != 0) {
      ::_exit(2);
    }
    ::_exit(complaint([&] { check_output(work / "out", input, false); }).code == Exit::busy ? 0
                                                                                            : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  fs::permissions(work.path(), fs::perms::owner_all);
}

TEST(RunDirectory, BeginsGoesOnAndEnds) {
  const ScratchDirectory work;
  const fs::path run = work / "run";
  fs::create_directory(run);
  EXPECT_EQ(run_state(run), RunState::fresh);
  {
    auto file = open_results(run, /*resume=*/true, kManifest, kLines, false);  // nothing to resume
    ASSERT_TRUE(file);
    file->append({1}, false, answered_line({1}, "a", "{}"), {0});
  }
  EXPECT_EQ(run_state(run), RunState::unfinished);
  auto file = open_results(run, true, kManifest, kLines, false);
  ASSERT_TRUE(file);
  EXPECT_TRUE(file->is_done({1}));
  file->append({2}, false, answered_line({2}, "b", "{}"), {0});
  publish(std::move(*file), run, work / "out", false, kLines);
  EXPECT_FALSE(open_results(run, true, kManifest, kLines, false)) << "finished";
  EXPECT_TRUE(fs::exists(work / "out"));
}

TEST(RunDirectory, AnUnfinishedRunIsNotBegunAnew) {
  const ScratchDirectory run;
  open_results(run.path(), false, kManifest, kLines, false)
      ->append({1}, false, answered_line({1}, "a", "{}"), {0});
  const std::string before = content_of(run / kPartialName);
  const auto said = complaint([&] { open_results(run.path(), false, kManifest, kLines, false); });
  EXPECT_EQ(said.code, Exit::cannot_start);
  EXPECT_THAT(said.sentence, HasSubstr("--resume"));
  EXPECT_THAT(said.sentence, HasSubstr("--run-dir"));
  EXPECT_EQ(content_of(run / kPartialName), before);
}

TEST(RunDirectory, AFinishedRunsDirectoryCanBeUsedAgain) {
  const ScratchDirectory work;
  fs::create_directory(work / "run");
  write_manifest(work / "run", kManifest);
  publish(finished_run(work / "run"), work / "run", work / "out", false, kLines);
  Manifest other = kManifest;
  other.input = "other";
  fs::create_directory(work / "fresh");
  EXPECT_FALSE(replaces_finished_run(work / "fresh", false));
  EXPECT_FALSE(replaces_finished_run(work / "run", true)) << "it would say that the run is finished";
  for (const char* name : {"run/orders.log", "run/orders.log.2"}) {
    work.write(name, "orders");
  }
  EXPECT_TRUE(replaces_finished_run(work / "run", false));
  EXPECT_EQ(run_state(work / "run"), RunState::finished) << "asking replaces nothing";
  EXPECT_TRUE(fs::exists(work / "run" / "orders.log.2"));
  const auto file = open_results(work / "run", false, other, kLines, false);
  ASSERT_TRUE(file);
  EXPECT_FALSE(fs::exists(work / "run" / "orders.log")) << "of the run before";
  EXPECT_FALSE(fs::exists(work / "run" / "orders.log.2"));
  EXPECT_FALSE(replaces_finished_run(work / "run", false));
  EXPECT_EQ(file->counts().lines(), 0u);
  EXPECT_EQ(run_state(work / "run"), RunState::unfinished);
  EXPECT_EQ(read_manifest(work / "run"), other);
  EXPECT_EQ(content_of(work / "out"), expected());
}

TEST(RunDirectory, AnotherInputModelBuildOrOptionIsNamed) {
  struct Row {
    Manifest now;
    const char* says;
  };
  std::vector<Row> table{{kManifest, "another input"},
                         {kManifest, "another model"},
                         {kManifest, "another build (build, now newer)"},
                         {kManifest, "another --dtype (float32, now float16)"},
                         {kManifest, "another --seed (not given, now 5)"},
                         {kManifest,
                          "another input (its SHA-256 began with input, now with other) and "
                          "another --dtype (float32, now not given)"}};
  table[0].now.input = "other";
  table[1].now.model = "other";
  table[2].now.build = "newer";
  table[3].now.options["--dtype"] = "float16";
  table[4].now.options["--seed"] = "5";
  table[5].now.input = "other";
  table[5].now.options.clear();
  for (const bool finished : {false, true}) {
    const ScratchDirectory work;
    fs::create_directory(work / "run");
    write_manifest(work / "run", kManifest);
    ResultsFile file = finished_run(work / "run");
    if (finished) {
      publish(std::move(file), work / "run", work / "out", false, kLines);
    }
    for (const Row& row : table) {
      const auto said = complaint([&] { open_results(work / "run", true, row.now, kLines, false); });
      EXPECT_EQ(said.code, Exit::foreign) << row.says;
      EXPECT_THAT(said.sentence, HasSubstr(row.says));
    }
  }
}

TEST(RunDirectory, ARunThatVerifiesKeepsOnlyWhatItVerified) {
  for (const bool verify_again : {true, false}) {
    const ScratchDirectory run;
    Bytes sound;
    {
      auto file = open_results(run.path(), false, kManifest, kLines, /*verify=*/true);
      EXPECT_EQ(read_verified(run.path()), Bytes{0});
      file->append({1}, false, answered_line({1}, "a", "{}"), {0});
      sound = file->size();
      write_verified(run.path(), sound);
      file->append({2}, false, answered_line({2}, "b", "{}"), {0});
    }
    const auto file = open_results(run.path(), true, kManifest, kLines, verify_again);
    EXPECT_TRUE(file->is_done({1}));
    EXPECT_FALSE(file->is_done({2}));
    EXPECT_GT(file->taken_back(), Bytes{0});
    EXPECT_EQ(read_verified(run.path()), verify_again ? std::optional(sound) : std::nullopt);
  }
}

TEST(RunDirectory, WhatARunComputedThatDidNotVerifyIsKept) {
  const ScratchDirectory run;
  open_results(run.path(), false, kManifest, kLines, false)
      ->append({1}, false, answered_line({1}, "a", "{}"), {0});
  EXPECT_TRUE(open_results(run.path(), true, kManifest, kLines, true)->is_done({1}));
  EXPECT_TRUE(open_results(run.path(), true, kManifest, kLines, true)->is_done({1}));
}

TEST(RunDirectory, ADamagedNoteOfWhatIsVerifiedIsRefused) {
  for (const char* text : {"", "x", "12", "-1\n", "1\n2\n"}) {
    const ScratchDirectory run;
    run.write(kVerifiedName, text);
    EXPECT_THAT(complaint([&] { read_verified(run.path()); }).sentence, HasSubstr("damaged")) << text;
  }
}

TEST(RunDirectory, ResultsWithoutAManifestAreForeign) {
  const ScratchDirectory run;
  run.write(kPartialName, "");
  EXPECT_EQ(complaint([&] { open_results(run.path(), true, kManifest, kLines, false); }).code,
            Exit::foreign);
}

TEST(Manifest, ReadsBackAndIsRefusedWhenDamaged) {
  const ScratchDirectory run;
  EXPECT_EQ(read_manifest(run.path()), std::nullopt);
  const Manifest full{"b 1", "in", "mo", {{"--dtype", "auto"}, {"served \"name\"", "é\n"}}};
  write_manifest(run.path(), full);
  EXPECT_EQ(read_manifest(run.path()), full);
  write_manifest(run.path(), kManifest);
  EXPECT_EQ(read_manifest(run.path()), kManifest);
  EXPECT_EQ(names_in(run.path()), std::vector<std::string>{"manifest.json"});
  for (const char* text : {"", "{", "[]", "{}", R"({"version":2})", R"({"version":1})",
                           R"({"version":1,"build":"b","input":"i","model":5})",
                           R"({"version":1,"build":"b","input":"i","model":"m","options":[]})"}) {
    run.write("manifest.json", text);
    EXPECT_NE(complaint([&] { read_manifest(run.path()); }).code, Exit::done) << text;
  }
}

TEST(Manifest, TheTextFilesOfAModelAreToldApart) {
  const ScratchDirectory model;
  const auto both = [&] {
    return std::pair(tokenizer_files_digest(model.path()), generation_config_digest(model.path()));
  };
  std::set<std::string> seen{both().first};
  const std::string no_generation_config = both().second;
  for (const char* name : {"tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json",
                           "added_tokens.json", "special_tokens_map.json"}) {
    model.write(name, "");
    EXPECT_TRUE(seen.insert(both().first).second) << name;
    model.write(name, "x");
    EXPECT_TRUE(seen.insert(both().first).second) << name;
  }
  model.write("README.md", "x");
  EXPECT_FALSE(seen.insert(both().first).second);
  EXPECT_EQ(both().second, no_generation_config);
  model.write("generation_config.json", "{}");
  EXPECT_FALSE(seen.insert(both().first).second);
  EXPECT_NE(both().second, no_generation_config);
}

TEST(RunDirectory, OtherFilesOfTheModelAreRefusedByName) {
  const ScratchDirectory run;
  Manifest then = kManifest;
  then.options["tokenizer files"] = std::string(64, 'a');
  Manifest now = then;
  now.options["tokenizer files"] = std::string(64, 'b');
  const auto refusal = complaint([&] { check_same_run(run.path(), then, now); });
  EXPECT_EQ(refusal.code, Exit::foreign);
  EXPECT_THAT(refusal.sentence, HasSubstr("other tokenizer files (SHA-256 aaaaaaaaaaaa…, now "
                                          "SHA-256 bbbbbbbbbbbb…)"));
}

TEST(RunDirectory, ADamagedPublicationIsSaid) {
  const ScratchDirectory run;
  for (const char* text : {"", "x", "5", "5\n", "\n/out"}) {
    run.write(kPublishedName, text);
    EXPECT_NE(complaint([&] { run_state(run.path()); }).code, Exit::done) << text;
  }
  const fs::path odd = std::string("/a \xff\n b");
  write_publication(run.path(), {odd, Bytes{77}});
  EXPECT_EQ(read_publication(run.path())->output, odd);
  EXPECT_EQ(read_publication(run.path())->size, Bytes{77});
}

}  // namespace
}  // namespace poise
