#include "planner/results/manifest.h"

#include <set>
#include <span>
#include <vector>

#include "common/files/json_file.h"
#include "common/files/regular_file.h"
#include "common/files/replace_file.h"
#include "common/files/sha256.h"
#include "common/trouble.h"

namespace poise {
namespace {

constexpr const char* kName = "manifest.json";
constexpr std::int64_t kManifestVersion = 1;
constexpr JsonLimits kLimits{kMiB, 8};
constexpr Bytes kLargestTextFile = kGiB;
constexpr const char* kTokenizerFiles[] = {"tokenizer.json",     "vocab.json",
                                           "merges.txt",         "tokenizer_config.json",
                                           "added_tokens.json",  "special_tokens_map.json",
                                           "chat_template.jinja"};
constexpr const char* kGenerationConfig[] = {"generation_config.json"};

std::string text_of(const JsonObject& object, const char* name) {
  const auto value = object.string(name);
  if (!value) {
    object.refuse(name, "is missing; use another run directory");
  }
  return *value;
}

// Enough of a digest to tell two apart.
std::string short_digest(const std::string& digest) { return shown(digest.substr(0, 12)); }

bool is_digest(const std::string& value) {
  return value.size() == 64 && value.find_first_not_of("0123456789abcdef") == std::string::npos;
}

std::string value_of(const std::map<std::string, std::string>& options, const std::string& name) {
  const auto found = options.find(name);
  if (found == options.end()) {
    return "not given";
  }
  return is_digest(found->second) ? "SHA-256 " + short_digest(found->second) + "…"
                                  : shown(found->second);
}

std::vector<std::string> differences(const Manifest& then, const Manifest& now) {
  std::vector<std::string> all;
  if (then.input != now.input) {
    all.push_back(fmt::format("another input (its SHA-256 began with {}, now with {})",
                              short_digest(then.input), short_digest(now.input)));
  }
  if (then.model != now.model) {
    all.push_back(fmt::format("another model (its fingerprint began with {}, now with {})",
                              short_digest(then.model), short_digest(now.model)));
  }
  if (then.build != now.build) {
    all.push_back(fmt::format("another build ({}, now {})", shown(then.build), shown(now.build)));
  }
  std::set<std::string> names;
  for (const auto* options : {&then.options, &now.options}) {
    for (const auto& [name, value] : *options) {
      names.insert(name);
    }
  }
  for (const std::string& name : names) {
    const std::string before = value_of(then.options, name), after = value_of(now.options, name);
    if (before != after) {
      all.push_back(fmt::format("{} {} ({}, now {})", name.ends_with("files") ? "other" : "another",
                                shown(name), before, after));
    }
  }
  return all;
}

std::string digest_of(const std::filesystem::path& directory, std::span<const char* const> names) {
  Sha256 digest;
  const auto add = [&](std::string_view text) {
    digest.update(std::as_bytes(std::span(text.data(), text.size())));
  };
  for (const char* name : names) {
    std::error_code none;
    if (std::filesystem::exists(directory / name, none)) {
      const std::string text = read_text_file(directory / name, kLargestTextFile);
      add(fmt::format("{} {}\n", name, text.size()));
      add(text);
    }
  }
  return to_hex(digest.finish());
}

}  // namespace

std::string tokenizer_files_digest(const std::filesystem::path& model_directory) {
  return digest_of(model_directory, kTokenizerFiles);
}

std::string generation_config_digest(const std::filesystem::path& model_directory) {
  return digest_of(model_directory, kGenerationConfig);
}

std::optional<Manifest> read_manifest(const std::filesystem::path& run_dir) {
  const std::filesystem::path path = run_dir / kName;
  std::error_code none;
  if (!std::filesystem::exists(path, none)) {
    return std::nullopt;
  }
  const nlohmann::json document = read_json_file(path, kLimits);
  const JsonObject object(document, shown(path.string(), 300));
  if (object.integer("version", {}).value_or(0) != kManifestVersion) {
    fail(Exit::foreign, "{} was written by another build; use another run directory",
         shown(path.string(), 300));
  }
  Manifest manifest{
      text_of(object, "build"), text_of(object, "input"), text_of(object, "model"), {}};
  if (const auto options = object.object("options")) {
    for (const auto& [name, value] : options->json().items()) {
      manifest.options[name] = text_of(*options, name.c_str());
    }
  }
  return manifest;
}

void write_manifest(const std::filesystem::path& run_dir, const Manifest& manifest) {
  const nlohmann::ordered_json document{{"version", kManifestVersion},
                                        {"build", manifest.build},
                                        {"input", manifest.input},
                                        {"model", manifest.model},
                                        {"options", manifest.options}};
  replace_file(run_dir / kName,
               document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + '\n');
}

void check_same_run(const std::filesystem::path& run_dir, const Manifest& then,
                    const Manifest& now) {
  const auto all = differences(then, now);
  if (all.empty()) {
    return;
  }
  std::string list = all.front();
  for (std::size_t i = 1; i < all.size(); ++i) {
    list += (i + 1 < all.size() ? ", " : " and ") + all[i];
  }
  fail(Exit::foreign,
       "{} belongs to {}; resume with what it was started with, or use another run "
       "directory",
       shown(run_dir.string(), 300), list);
}

}  // namespace poise
