"""What a model might write to attack a page that reads it as HTML."""

HOSTILE = """\
<img src=x onerror="alert(1)"> <script>alert(1)</script> <b>bold</b> <svg onload=alert(1)>
<a href=x onclick=alert(1)>a</a> <iframe src='https://elsewhere.example/'></iframe>
[a](javascript:alert(1)) ![picture](javascript:alert(1))

![picture](https://elsewhere.example/)

```html
<style>body{display:none}</style><form action=https://elsewhere.example/><input></form>
```
"""
