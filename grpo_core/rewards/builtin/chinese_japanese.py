"""Find the answer in Chinese and Japanese prose, whose words no spaces part: 答案是72, 共有72个苹果, 答えは72です.

Only what is clear counts: after the words that state or conclude stands the answer, then at most a known unit with what
is counted, and the sentence ends. A hedge, a bound, a denial or a supposition states nothing. Texts are in NFKC, in
which ： and ， are ASCII.
"""

from __future__ import annotations

import re

LONGEST = 1000  # characters of a sentence
POWERS = {"万": 4, "萬": 4, "亿": 8, "億": 8}
MYRIAD = re.compile(r"(?<=\d)\s*([万萬亿億])")
CJK = "\u3005\u3040-\u30ff\u3400-\u9fff"  # Chinese and Japanese letters, for a class of characters
COUNTER = (
    "[个個种種颗顆只隻支条條张張本枚匹头頭台辆輛件块塊朵棵株组組对對名人"
    "套班桶盒箱袋杯瓶碗盘片根把座艘架份篇首句冊册つ]|位(?=[同学老师學朋友客顾乘游])"
)
MEASURE = (
    "[元円圆圓角分秒度米克斤吨升公里尺寸天日年岁歳歲周週次回页頁层層排行列步票题題级級点點期节節章门門间間场場家所户戶户羽通遍项項时時]"
    "|[个個]月|[かヶカケ箇]月(?:間)?|小时|小時|时间|時間|分[钟鐘間]|秒[钟鐘間]|日間|年間|週間|周間|星期|礼拜|美[元金]|日元|欧元|英镑|人民币|[元块塊][钱錢]?|毛"
    "|(?:平方|立方)?(?:[千厘分毫公微]?米|公里|[センチミリキロ]*メートル)(?:[长長高宽寬远遠深])?|[千毫]?克|公[斤顷頃]|[千毫]?升|毫升"
    "|ドル|ユーロ|(?:キロ|ミリ)?グラム|(?:ミリ)?リットル|キロ|センチ|ページ|パーセント|通り|坪|畳|摄氏度|伏特?|瓦特?|焦耳?|牛顿?|千瓦时?"
)
NOUN = (  # what is counted, without letters that may take part of it or compute with it
    rf"(?:(?![以不非未超半的之の倍成割折百十千万億亿多余几下上な第乗根約因违违違加减減乘除打一二三四五六七八九两太了是有在会能"
    rf"中内里外前后後间間位数數和差积積商合均分平计計比每毎各被为もかがをにでとへさずつ目番桁进進整余値值价代长長重级級])[{CJK}]){{1,4}}"
)
CJK_UNIT = (
    rf"(?:(?:(?:{COUNTER})(?:(?:不同)?的|の)?{NOUN}|(?:{COUNTER}|{MEASURE})(?:(?:/|每)(?:{COUNTER}|{MEASURE}))?)"
    r"(?:左右|[くぐ]らい)?|左右|[くぐ]らい)"
)
DENIAL = (
    "不是|并非|並非|不等于|不等於|不为|不為|不对|不對|不正确|不正確|错误|錯誤|ではな|ではあり|じゃな|違い|違う|間違"
)
NOT = re.compile(
    rf"{DENIAL}|不能(?!被)|不[会會应應该該要](?![被])|不可|[无無]法|未必|不一定|难以|難以|怎|不[就便]?是|不就|什么|什麼|岂|难道|凭啥|哪|何[故以必]|わけがな|はずがな|とは限ら|できな"
)
WRONG = rf"{DENIAL}|(?<!没)[错錯]|[误誤](?!差)|矛盾|不成立|[×✗✘✕✖❌]|\\times\W*\Z"
LATER = re.compile(rf"{WRONG}|更正|修正|纠正|訂正|重新|应该是|应为|等等|等一下|いや|待って|正しくは")
TAKEN_BACK = re.compile(rf"{LATER.pattern}|那[么麼]|则|就会|不確|不确定|不一定")
BEFORE = re.compile(
    rf"{NOT.pattern}|以为|以為|有人|他们说|[如若]|除非|假|倘|即使|就算|哪怕|只[要有]|一旦|[猜]|要是|万一|不妨|反证|たとえ|もし|仮|なら|[他她]说|曾|原本|原来"
)
IF = re.compile(r"[如若](?!图|下|上|何)|除非|假[如定设設]|倘|即使|就算|哪怕|只要|要是|たとえ|もし|仮に|なら")
COPULA = r"(?:应该|应|應|就|便|约|約|\s|\*)*(?:是|为|為|等于|等於|は|:|=)"
STATED = re.compile(
    rf"(?:【(?:最终|最終|参考|正确)?(?:答案|答え|正解|解答)】)[\s:]*|(?:答案|答え|正解|解答|最终结果|最終結果){COPULA}[\s:*]*"
    rf"|(?<![{CJK}])答\s*[:は]\s*"
    r"|(?<![^\s,。]|[不别])(?:故|应|應|因此|所以)? ?[选選]择? ?:? ?(?=[A-J](?![A-Za-z]))"
)
CONCLUSION = re.compile(
    r"所以|因此|因而|从而|於是|于是|故(?![事障乡])|综上|总共|一共|(?<!公)共有?(?!同)|总计|合[计計]|全部で|等[于於]|得到"
    r"|(?<![获取觉值懂])得|即|(?<![不还于但可只总])是(?![否不])|(?<![因以认作不])[为為]|は|よって|したがって|ゆえに|だから|つまり"
)
ENUMERATED = re.compile(r"^\s*\(?\d+[.)、]\s*")
SENTENCE_END = re.compile(rf"[。!?\n]|\.(?=\s|\Z)|(?=【[{CJK}])")
REASON = re.compile(
    r"[,;]?\s*(?=因为|因為|由于|由於|即(?!使|便)|也就是|而不是|而非|なぜなら|つまり)|[,;]\s*(?=比|其中|不是\s*[\dA-J])"
)
SUPPOSED = re.compile(
    "如果|假[如定设設]|若|倘|除非|要是|即使|就算|哪怕|もし|仮に|なら|とす[るれ]|場合|吗|嗎|呢|吧|ですか|でしょう|だろう|ますか"
    "|猜|恐怕|似乎|好像|看起来|或者?是|かな|気が|思[いうっ]|はず|らし|よう[だで]|みたい|可能|也许|或许|大概|估计|かも|たぶん|おそらく"
    "|(?:因为|因為|由于|由於|なぜなら)(?!.*(?:所以|因此|故))"
)
BOUND = re.compile(  # and not 最小値, 最大公约数
    "至少(?!需|要|用|花|买)|至多|不[到足满少多过超低高]|最[多少小大高低](?![公的]|[数數]?[值値])|少なくとも|多くとも|高々|最低でも|せいぜい"
    "|将近|接近|近似|大[于於]|小[于於]|[少多高低][于於]|以[上下内外]|超[过過え]|未[満满]|より|范围|之间|以下"
)
UNCLEAR = re.compile(  # what hedges, bounds or changes a number, or numbers something else
    r"不(?!同)|没|沒|非(?!常)|[无無未错錯误誤違否]|ない|ませ"
    r"|以[上下内外]|超[过過え]|[少多大小高低][于於]|より|比(?![例率值])"
    r"|[加减減乘除](?=[上去以于一二三四五六七八九十两])|足す|引く|掛け|割る"
    r"|(?:平方|立方)(?![米厘公分千毫メセキ])|次方|乗|[幂冪]|阶乘|倒数|逆数|相反数|[绝絶][对対][值値]|方根|根号|ルート"
    r"|半(?![径徑])|[两二三四五六七八九十双]倍|ダース|[因约約倍]数"
    r"|\d\s*(?:[十折割又打]|百(?![米帕])|千(?![克米瓦卡])|[多余来几成]|点[一二三四五六七八九零])"
    r"|(?:[十百千第点又]|零下)(?:\s|\\\(|\$)*\d"
    r"|(?:步骤|步驟|问题|問題|ステップ|例|方法|情况|[图図式注])\s*\(?\d"
)
SPELLINGS = (
    (MYRIAD, lambda scale: f" \\cdot 10^{{{POWERS[scale[1]]}}}"),
    (re.compile(r"(?:[负負]|マイナス)\s*(?=\d)"), "-"),
    (re.compile(r"百分之\s*(\d+(?:\.\d+)?)"), r"\1%"),
    (re.compile(r"(?<=\d)\s*パーセント"), "%"),
    (re.compile(r"(?<![\d.])(\d+)\s*分[之の]\s*(\d+)"), r"\2/\1"),
    (re.compile(rf"(?<=[^{CJK}、])\s*(?:和|与|與|及|以及|或者?|と|または|、)\s*(?=[^{CJK}、])"), ", "),
)


# All that may stand before and after the answer in its sentence.
VERB = "[是为為有共剩余餘需用花卖賣买買得吃走跑读讀做付给給送拿种養养收修生产]"
PREFIX = (
    rf"[\s,、:*]*(?:(?:[{CJK}]{{0,16}})(?:{VERB}|剩下|需要|[总總]共|总计|总数|全部で|合計で?)[出了要下到掉回来]{{0,2}}\s*)?"
    r"(?:[約约]|大约|选项|選択肢)?\s*[「『【]?"
)
PREDICATE = (
    r"です|だ|である|でした|だった|とな[るり](?:ます|ました|った)?|にな[るり](?:ます|ました)?|(?:が|は)?(?:あ[るり]|い[るま]|残[りる]|必要)(?:ます|ました|です)?"
    r"|を?[売買使食作払走残持取配読描書切集並][りいきっしみべん]?(?:ました|ます|った|た|だ|る|う)"
)
AFTER = rf"(?:\s*\(?(?:{CJK_UNIT}|UNIT_MORE)\)?)?\s*[」』】]?[\s*]*(?:{PREDICATE})?[\s.;:*」』】]*"
ANSWER = rf"(?P<answer>[^\w「」『』【】、]*+(?![{CJK}])\w[^{CJK}「」『』【】、]*?)"
STATES = re.compile(PREFIX + ANSWER + AFTER.replace("UNIT_MORE", "倍|选?项"))
CONCLUDES = re.compile(PREFIX + ANSWER + AFTER.replace("|UNIT_MORE", ""))
CHOICE_TEXT = re.compile(rf"[\s:*]*(?P<answer>[A-J])\s*[.:]\s*[{CJK}]+")  # B.东京
INVERTED = re.compile(
    rf"(?:所以|因此|故|可见|よって|したがって|つまり)?[\s,]*{ANSWER}\s*(?:{CJK_UNIT})?"
    r"(?:(?:就|便|即|才)?[是为]|が)(?:本题的?|最终的?|正确的?|所求的?|最終的?な?)?(?:答案|答え|正解)(?:です|だ|である|となります|になります)?[\s.!。]*"
)


def stated_answer(text: str) -> str | None:
    """The answer that the last "the answer is" introduces; None if there is none, or not clearly one. Several joined by
    "and" or "or" are a list."""
    *_, stated = [None, *STATED.finditer(text)]
    if stated is None:
        return None
    sentence, asked, later = _sentence(text[stated.end() :])
    whole = SENTENCE_END.split(text[: stated.start()])[-1]
    clause = whole.rpartition(",")[2]
    supposed = SUPPOSED.search(clause) or (IF.search(whole) and not re.search("所以|因此|故|よって|したがって", clause))
    if asked or supposed or BEFORE.search(clause) or LATER.search(later):
        return None
    return _only_answer(sentence, STATES)


def concluded_answer(text: str) -> str | None:
    """The number after the last "so", "in total" or the like of the last sentence; None if it is not clearly one."""
    line = ENUMERATED.sub("", text.strip().rpartition("\n")[2])[-LONGEST:]
    *_, last = ["", *(part for part in re.split(r"(?<=[。!?])", line) if part.strip())]
    if NOT.search(last) or SUPPOSED.search(last):
        return None
    if inverted := INVERTED.fullmatch(re.sub(r"\s+", " ", last.strip())):
        return inverted["answer"].strip(" ,:;*")
    *_, conclusion = [None, *CONCLUSION.finditer(last)]
    if conclusion is None or STATED.search(last):
        return None
    if re.search(rf"{BOUND.pattern}|[没沒未]", last[: conclusion.end()].rpartition(",")[2]):
        return None
    sentence, asked, _ = _sentence(last[conclusion.end() :])
    answer = None if asked else _only_answer(sentence, CONCLUDES)
    return answer if answer and re.search(r"\d", answer) else None


def has_unclear_number(text: str) -> bool:
    """True if in a line a number stands beside Chinese or Japanese letters, or numbers a line of them."""
    beside = re.search(rf"\d[ \t*$]*[{CJK}]|[{CJK}][ \t*$]*[-+]?\d", text)
    return bool(beside or re.search(rf"(?m){ENUMERATED.pattern}.*[{CJK}]", text))


def _sentence(text: str) -> tuple[str, bool, str]:
    """The first sentence, whether it is a question, and the text after it. A long one is cut."""
    end = SENTENCE_END.search(text)
    return (text[: end.start()][:LONGEST], end[0] == "?", text[end.end() :]) if end else (text[:LONGEST], False, "")


def _only_answer(sentence: str, form: re.Pattern[str]) -> str | None:
    """The answer of a sentence, if all around it is of the form and nothing later takes it back."""
    stated, *reason = REASON.split(sentence, maxsplit=1)
    said, *others = re.split(rf",(?=\s*[{CJK}])|,\s*(?=[×✗✘✕✖❌])", stated)
    if any(re.search(WRONG, part) for part in reason if not re.match("而?不是|而非", part)):
        return None
    if any(
        TAKEN_BACK.search(other) or SUPPOSED.search(other) or re.search(r"\w", re.sub(f"[{CJK}]", "", other))
        for other in others
    ):
        return None
    said = re.sub(r"\s+", " ", said)
    for pattern, spelling in SPELLINGS:
        said = pattern.sub(spelling, said)
    if (
        NOT.search(said)
        or UNCLEAR.search(said)
        or BOUND.search(said)
        or SUPPOSED.search(said)
        or re.search(WRONG, said)
    ):
        return None
    match = form.fullmatch(said) or CHOICE_TEXT.fullmatch(said)
    answer = match["answer"].strip(" ,:;*") if match else ""
    return None if re.search(r"\A\W*\d.*\(\s*[xX?]\s*\)\W*\Z", answer) else answer or None
