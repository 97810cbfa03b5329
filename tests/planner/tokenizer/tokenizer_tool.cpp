// Puts the tokenizer at the end of a pipe, so that another program can compare it with a reference.
//
//   poise-tokenizer-tool DIR encode|encode-plain|decode|decode-all|decode-stream < in > out
//   poise-tokenizer-tool PATTERN cut < in > out
//
// Both pipes carry records: a little-endian u32 with the number of elements, then the elements:
// bytes of UTF-8, or ids as i32. `decode-stream` joins the texts of a Detokenizer. `cut` gives the byte offsets at which the text is cut, as i32.

#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/trouble.h"
#include "planner/tokenizer/detokenizer.h"
#include "planner/tokenizer/pattern.h"
#include "planner/tokenizer/tokenizer.h"

namespace poise {
namespace {

template <typename Sequence>
std::optional<Sequence> read_record() {
  std::uint32_t count = 0;
  if (std::fread(&count, sizeof count, 1, stdin) != 1) {
    return std::nullopt;
  }
  Sequence elements(count, {});
  if (count > 0 && std::fread(elements.data(), sizeof elements[0], count, stdin) != count) {
    fail("the input ends inside a record");
  }
  return elements;
}

template <typename Sequence>
void write_record(const Sequence& elements) {
  const auto count = static_cast<std::uint32_t>(elements.size());
  std::fwrite(&count, sizeof count, 1, stdout);
  std::fwrite(elements.data(), sizeof elements[0], count, stdout);
}

void cut(const std::string& expression) {
  const Pattern pattern = Pattern::compile(expression, "pattern");
  std::vector<Pattern::Match> matches;
  while (const auto text = read_record<std::string>()) {
    pattern.find_all(*text, matches);
    std::vector<std::int32_t> places;
    for (const Pattern::Match& match : matches) {
      for (const std::size_t place : {match.begin, match.end}) {
        const auto at = static_cast<std::int32_t>(place);
        if (place > 0 && place < text->size() && (places.empty() || places.back() != at)) {
          places.push_back(at);
        }
      }
    }
    write_record(places);
  }
}

std::string streamed(const Tokenizer& tokenizer, const std::vector<TokenId>& ids) {
  Detokenizer detokenizer(tokenizer);
  std::string text;
  for (const TokenId id : ids) {
    text += detokenizer.push(id);
  }
  return text + detokenizer.finish();
}

void tokenize(const std::string& directory, std::string_view task) {
  const Tokenizer tokenizer = Tokenizer::load(directory, std::numeric_limits<TokenId>::max());
  if (task.starts_with("encode")) {
    while (const auto text = read_record<std::string>()) {
      write_record(tokenizer.encode(*text, task == "encode"));
    }
  } else {
    while (const auto ids = read_record<std::vector<TokenId>>()) {
      write_record(task == "decode-stream" ? streamed(tokenizer, *ids)
                                           : tokenizer.decode(*ids, task == "decode"));
    }
  }
}

}  // namespace
}  // namespace poise

int main(int argc, char** argv) {
  const std::string_view task = argc == 3 ? argv[2] : "";
  if (task != "encode" && task != "encode-plain" && task != "decode" && task != "decode-all" &&
      task != "decode-stream" && task != "cut") {
    std::fputs(
        "usage: poise-tokenizer-tool DIR encode|encode-plain|decode|decode-all|decode-stream\n"
        "       poise-tokenizer-tool PATTERN cut\n",
        stderr);
    return 2;
  }
  try {
    task == "cut" ? poise::cut(argv[1]) : poise::tokenize(argv[1], task);
  } catch (const std::exception& trouble) {
    std::fprintf(stderr, "%s\n", trouble.what());
    return 2;
  }
  return 0;
}
