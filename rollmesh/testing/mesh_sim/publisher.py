"""temp"""

from rollmesh.testing.mesh_sim.kernel import Node


class SimPublisher(Node):
    def __init__(self, kernel, network, engines, client):
        super().__init__("publisher")
        self.k = kernel
        self.c = client
        self.e = engines

    def start(self):
        self.tick()

    def restart(self):
        super().restart()
        self.start()

    def tick(self):
        while self.c.to_publish:
            self.c.published(self.c.to_publish.pop(0))
        self.k.after(0.1, self.tick, self)
