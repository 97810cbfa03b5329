#pragma once
// What a run is of: RUN/manifest.json says which input, model, build and options its answers belong
// to, so that --resume never mixes two runs. Holds only what changes answers; policies, budgets and
// devices may differ from one attempt to the next. Free functions; one process at a time (run.lock).

#include <filesystem>
#include <map>
#include <optional>
#include <string>

namespace poise {

struct Manifest {
  std::string build;
  std::string input;  // SHA-256 of the input file, hex
  std::string model;  // the model's fingerprint, hex
  // What else changes answers, by the option's name: "--dtype" → "float32".
  std::map<std::string, std::string> options;

  friend bool operator==(const Manifest&, const Manifest&) = default;
};

// Digests of the files of a model directory that its fingerprint does not cover and that change
// answers, in hex. Absent ones count as absent.
std::string tokenizer_files_digest(const std::filesystem::path& model_directory);
std::string generation_config_digest(const std::filesystem::path& model_directory);

// Nothing where the directory has none; fails where it is damaged.
std::optional<Manifest> read_manifest(const std::filesystem::path& run_dir);
void write_manifest(const std::filesystem::path& run_dir, const Manifest& manifest);

// Fails with Exit::foreign, naming everything that differs, if `now` is not what the run was of.
void check_same_run(const std::filesystem::path& run_dir, const Manifest& then,
                    const Manifest& now);

}  // namespace poise
