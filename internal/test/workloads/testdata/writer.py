# Writes to a database without end: each transaction takes from one account and gives to another, and adds a row. What has been
# committed is noted in a file, so that a row that is missing afterwards is known.
import os, sqlite3, sys, threading, time
from lines import serve

path, log = sys.argv[2], sys.argv[3]
db = sqlite3.connect(path, isolation_level=None)
db.executescript('''
    PRAGMA synchronous = FULL;
    CREATE TABLE account (id INTEGER PRIMARY KEY, amount INTEGER NOT NULL);
    INSERT INTO account VALUES (1, 1000000), (2, 0);
    CREATE TABLE move (n INTEGER PRIMARY KEY, stamp TEXT NOT NULL);
''')
done = 0
trouble = ''


def run():
    global done, trouble
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        while True:
            n = done + 1
            db2.execute('BEGIN IMMEDIATE')
            db2.execute('UPDATE account SET amount = amount - 1 WHERE id = 1')
            db2.execute('INSERT INTO move VALUES (?, ?)', (n, 'row %d' % n))
            db2.execute('UPDATE account SET amount = amount + 1 WHERE id = 2')
            db2.execute('COMMIT')
            os.write(out, b'%d\n' % n)
            done = n
            time.sleep(0.05)
    except Exception as e:
        trouble = repr(e)


db.close()
db2 = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=600)
threading.Thread(target=run, daemon=True).start()


def answer(_):
    return '%d %d %s' % (os.getpid(), done, trouble or 'ok')


serve(int(sys.argv[1]), answer)
