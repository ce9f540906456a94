def load(name):
    raise FileNotFoundError(f"no data set at /data/{name}")
