#include "planner/tokenizer/added_token_finder.h"

#include "common/files/regular_file.h"
#include "common/trouble.h"
#include "planner/tokenizer/unicode.h"

namespace poise {
namespace {

std::uint64_t edge(std::uint32_t node, char byte) {
  return std::uint64_t{node} << 8 | static_cast<unsigned char>(byte);
}

// Of the character that ends at `end`, its first byte.
std::size_t before(std::string_view text, std::size_t end) {
  do {
    --end;
  } while (is_continuation(text[end]));
  return end;
}

bool stands_alone(std::string_view text, std::size_t begin, std::size_t end) {
  const bool joined_left = begin > 0 && is_word(code_point_at(text, before(text, begin)).value);
  const bool joined_right = end < text.size() && is_word(code_point_at(text, end).value);
  return !joined_left && !joined_right;
}

}  // namespace

void AddedTokenFinder::Tree::add(std::string_view content, const AddedToken& token) {
  first_bytes_.set(static_cast<unsigned char>(content.front()));
  std::uint32_t node = 0;
  for (const char byte : content) {
    const auto [child, fresh] =
        children_.try_emplace(edge(node, byte), static_cast<std::uint32_t>(ends_.size()));
    if (fresh) {
      ends_.push_back(nullptr);
    }
    node = child->second;
  }
  if (ends_[node] == nullptr) {  // two may be the same once they are normalized
    ends_[node] = &token;
  }
}

AddedTokenFinder::Tree::Found AddedTokenFinder::Tree::longest_at(std::string_view text,
                                                                 std::size_t at) const {
  Found longest;
  std::uint32_t node = 0;
  for (; at < text.size(); ++at) {
    const auto child = children_.find(edge(node, text[at]));
    if (child == children_.end()) {
      break;
    }
    node = child->second;
    if (ends_[node] != nullptr) {
      longest = {ends_[node], at + 1};
    }
  }
  return longest;
}

void AddedTokenFinder::Tree::split(std::string_view text, std::vector<TextPart>& parts) const {
  std::size_t done = 0;  // what lies before it is in `parts`
  std::size_t at = 0;
  while (at < text.size()) {
    const Found found =
        first_bytes_[static_cast<unsigned char>(text[at])] ? longest_at(text, at) : Found{};
    const AddedToken* token = found.token;
    if (token == nullptr) {
      ++at;
      continue;
    }
    std::size_t begin = at;
    std::size_t end = found.end;
    at = end;  // also where it does not count: what it covers is not looked at again
    if (token->single_word && !stands_alone(text, begin, end)) {
      continue;
    }
    if (token->lstrip) {
      while (begin > done) {
        const std::size_t left = before(text, begin);
        if (left < done || !is_space(code_point_at(text, left).value)) {
          break;
        }
        begin = left;
      }
    }
    while (token->rstrip && end < text.size()) {
      const CodePoint c = code_point_at(text, end);
      if (!is_space(c.value)) {
        break;
      }
      end += c.bytes;
    }
    if (begin > done) {
      parts.push_back({text.substr(done, begin - done), nullptr});
    }
    parts.push_back({text.substr(begin, end - begin), token});
    // White space that this token took can be an added token too, and is then found once more.
    done = end;
  }
  if (done < text.size()) {
    parts.push_back({text.substr(done), nullptr});
  }
}

AddedTokenFinder::AddedTokenFinder(const std::vector<AddedToken>& tokens,
                                   const Normalizer& normalizer) {
  for (const AddedToken& token : tokens) {
    if (!token.normalized) {
      plain_.add(token.content, token);
      continue;
    }
    const std::string content = normalizer.normalize(token.content);
    if (content.empty()) {
      fail("the tokenizer's normalizer leaves nothing of the added token \"{}\"",
           shown(token.content));
    }
    normalized_.add(content, token);
  }
}

std::vector<AddedTokenFinder::TextPart> AddedTokenFinder::split(std::string_view text) const {
  std::vector<TextPart> parts;
  plain_.split(text, parts);
  return parts;
}

std::vector<AddedTokenFinder::TextPart> AddedTokenFinder::split_normalized(
    std::string_view text) const {
  std::vector<TextPart> parts;
  normalized_.split(text, parts);
  return parts;
}

}  // namespace poise
