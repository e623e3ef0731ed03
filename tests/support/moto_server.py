"""Program that serves moto on a free loopback port. The first line of its standard output is the address."""

import logging
import time

from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
print(f"http://127.0.0.1:{port}", flush=True)
while True:
    time.sleep(3600)
