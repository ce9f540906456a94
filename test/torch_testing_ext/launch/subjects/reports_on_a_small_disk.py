import os
import sys
from pathlib import Path

from torch_testing_ext.launch.accounts import AccountFile, RankAccount, RankEnding, read_account

disk = Path(sys.argv[1])
account_file = AccountFile.open(disk / "account")
try:
    (disk / "filler").write_bytes(bytes(1 << 20))
except OSError as error:
    print(f"{error.errno}, {os.statvfs(disk).f_bavail} blocks left")
account_file.write(RankAccount(RankEnding.ERROR, 0.0, 1.0, "s" * 90_000, "t" * 300_000 + "\nlast line", 10))
account = read_account(disk / "account")
print(account.ending.value)
print(account.traceback.splitlines()[-1])
