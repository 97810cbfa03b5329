"""Whether C++ sources include what they name: builds compile a folder's sources together, behind one precompiled header, so a
compiler does not see it. Of a header, any of this project's files that it includes may bring it."""

import re

# A header of the standard library, and names that come from it.
_STANDARD = {
    "algorithm": "sort stable_sort min_element max_element any_of all_of none_of find_if copy fill transform count_if remove_if "
    "lower_bound upper_bound clamp ranges",
    "array": "array",
    "atomic": "atomic",
    "bit": "bit_cast bit_ceil bit_floor bit_width",
    "charconv": "from_chars to_chars",
    "chrono": "chrono",
    "cmath": "sqrt exp pow abs isnan isfinite ceil floor lround log2",
    "condition_variable": "condition_variable",
    "cstring": "memcpy memset memcmp strerror strlen",
    "deque": "deque",
    "filesystem": "filesystem",
    "fstream": "fstream ifstream ofstream",
    "functional": "function hash less greater",
    "limits": "numeric_limits",
    "map": "map multimap",
    "memory": "unique_ptr shared_ptr make_unique make_shared",
    "mutex": "mutex lock_guard unique_lock scoped_lock once_flag",
    "numeric": "accumulate iota reduce gcd lcm",
    "optional": "optional nullopt",
    "random": "mt19937 mt19937_64 uniform_int_distribution uniform_real_distribution",
    "set": "set multiset",
    "span": "span",
    "sstream": "stringstream istringstream ostringstream",
    "string": "string to_string",
    "string_view": "string_view",
    "thread": "thread this_thread",
    "tuple": "tuple tie make_tuple",
    "unordered_map": "unordered_map",
    "utility": "move pair exchange swap forward",
    "variant": "variant visit get_if holds_alternative",
    "vector": "vector",
}
# Where any header of a library will do: how its headers begin, and what names it.
_NAMED = [(header + "$", re.compile(rf"\bstd::({'|'.join(names.split())})\b")) for header, names in _STANDARD.items()]
_NAMED += [(f"{library}/", re.compile(rf"\b{library}::")) for library in ("fmt", "nlohmann", "spdlog")]
_NAMED.append(("g(test|mock)/", re.compile(r"^TEST(_F|_P)?\(", re.MULTILINE)))


def without(texts):
    """What is named in `texts` (of each file, by its path from the root) without its header: (path, name, how the header begins)."""
    included = {path: re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE) for path, text in texts.items()}
    for path, text in texts.items():
        reached, ahead = set(), [path]
        while ahead:
            new = set(included.get(ahead.pop(), ())) - reached
            reached |= new
            ahead += new
        code = re.sub(r"//.*", "", text)
        for header, names in _NAMED:
            named = names.search(code)
            if named and not any(re.match(header, one) for one in reached):
                yield path, named.group(0), header.rstrip("$")
