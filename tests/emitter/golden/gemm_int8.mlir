// castiron emit --kernel gemm --shape 16x64 --codec q4_1 --tokens 9 --numerics fast --isa avx2 --threads 2
// 1039 lines, sha256 8c09825ef45d9cfeae302ecbbfc987f6d5d357bbdaae3f672561f89a03b3cc9c
                %124:10 = scf.for %113 = %c0 to %c9 step %c1 iter_args(%114 = %103, %115 = %104, %116 = %105, %117 = %106, %118 = %107, %119 = %108, %120 = %109, %121 = %110, %122 = %111, %123 = %112) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                  %125 = arith.muli %113, %c7 : index
                  %126 = vector.load %2[%113, %92] : memref<2x16xf32>, vector<8xf32>
                  %127 = vector.load %3[%113, %92] : memref<2x16xf32>, vector<8xf32>
                  %128 = vector.load %2[%113, %94] : memref<2x16xf32>, vector<8xf32>
                  %129 = vector.load %3[%113, %94] : memref<2x16xf32>, vector<8xf32>
                  %130 = arith.addi %91, %c1 : index
                  %131 = arith.addi %91, %c9 : index
                  %132 = arith.addi %91, %c15 : index
                  %133 = arith.addi %91, %c4 : index
                  %134 = arith.divui %19, %c10 : index
                  %135 = arith.addi %134, %113 : index
                  %136 = vector.broadcast %c20 : i32 to vector<8xi32>
                  %137 = vector.broadcast %c20 : i32 to vector<8xi32>
                  %138 = vector.broadcast %c20 : i32 to vector<8xi32>
                  %139 = vector.broadcast %c20 : i32 to vector<8xi32>
                  %140 = vector.broadcast %c20 : i32 to vector<8xi32>
                  %141 = vector.load %1[%125, %92] : memref<16x16xi32>, vector<8xi32>
                  %142 = vector.load %1[%125, %94] : memref<16x16xi32>, vector<8xi32>
                  %143 = vector.bitcast %141 : vector<8xi32> to vector<32xi8>
                  %144 = vector.bitcast %142 : vector<8xi32> to vector<32xi8>
                  %145 = arith.muli %135, %c7 : index
                  %146 = memref.load %m0[%91, %145] : memref<9x16xi32>
                  %147 = vector.broadcast %146 : i32 to vector<8xi32>
                  %148 = vector.bitcast %147 : vector<8xi32> to vector<32xi8>
                  %149 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%143, %148) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %150 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%144, %148) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %151 = memref.load %m0[%130, %145] : memref<9x16xi32>
                  %152 = vector.broadcast %151 : i32 to vector<8xi32>
                  %153 = vector.bitcast %152 : vector<8xi32> to vector<32xi8>
                  %154 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%143, %153) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %155 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%144, %153) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %156 = memref.load %m0[%131, %145] : memref<9x16xi32>
                  %157 = vector.broadcast %156 : i32 to vector<8xi32>
                  %158 = vector.bitcast %157 : vector<8xi32> to vector<32xi8>
                  %159 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%143, %158) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %160 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%144, %158) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %161 = memref.load %m0[%132, %145] : memref<9x16xi32>
                  %162 = vector.broadcast %161 : i32 to vector<8xi32>
                  %163 = vector.bitcast %162 : vector<8xi32> to vector<32xi8>
// 395 lines more
                  %559 = memref.load %m1[%133, %135] : memref<9x2xf32>
                  %560 = vector.broadcast %559 : f32 to vector<8xf32>
                  %561 = math.fma %558, %560, %122 : vector<8xf32>
                  %562 = memref.load %m2[%133, %135] : memref<9x2xf32>
                  %563 = vector.broadcast %562 : f32 to vector<8xf32>
                  %564 = math.fma %127, %563, %561 : vector<8xf32>
                  %565 = arith.mulf %501, %128 : vector<8xf32>
                  %566 = memref.load %m1[%133, %135] : memref<9x2xf32>
                  %567 = vector.broadcast %566 : f32 to vector<8xf32>
                  %568 = math.fma %565, %567, %123 : vector<8xf32>
                  %569 = memref.load %m2[%133, %135] : memref<9x2xf32>
                  %570 = vector.broadcast %569 : f32 to vector<8xf32>
                  %571 = math.fma %129, %570, %568 : vector<8xf32>
                  scf.yield %508, %515, %522, %529, %536, %543, %550, %557, %564, %571 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
                }
