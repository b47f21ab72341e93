"""Answers of a model, chosen by a word of the question."""

TABLE = """\
| name | value |
|:-----|------:|
| a \\| b | 1<br>2 |
| `x` | **3** |

- [x] done
- [ ] to do

H<sub>2</sub>O and `code`, ~~gone~~, see https://example.org/page.
"""
FORMULA = r"""The formula \(a_1 * b_2 * c\) costs $5 and $6. It is

\[
x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}
\]

and $e^{i\pi} + 1 = 0$, but not \(\undefinedcommand{\).
"""
CODE = """\
Here:

```python
def add(a, b):
    # a comment
    return a + b  # <b>not bold</b>
```

```nonsense
&lt;x&gt;
```
"""
THOUGHTS = "<think>First I think.\n\nThen **slowly** I think again.</think>The answer is 5."
STORY = "Once upon a time there was a fox. " * 200

ANSWERS = {"table": TABLE, "formula": FORMULA, "code": CODE, "think": THOUGHTS}
